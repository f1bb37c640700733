"""The tables of `quire plan`: memory, speed and cost, what to turn on next, and the settings that a search tried."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from rich.table import Table

from quire.units import GIB
from quire_lab.plan.advice import Step
from quire_lab.plan.by_engine import Figures, spread
from quire_lab.sim.search import Found


def advice_table(steps: list[Step], objective: str) -> Table:
    """Return what to change next, with what each change alone brings."""
    unit, scale, better = {
        "throughput": ("requests/s, at most", 1, "more"),
        "latency": ("E2EL, ms", 1e3, "faster"),
        "cost": ("device-seconds a request", 1, "cheaper"),
    }[objective]
    table = Table("what to turn on next", unit, "what it brings", "", box=None, pad_edge=False)
    for step in steps:
        before, after = (
            "none" if x is None or (x == 0 and objective == "throughput") else f"{x * scale:,.4g}"
            for x in (step.before, step.after)
        )
        brings = f"{step.effect:.2f} × {better}" if isfinite(step.effect) else "it works at all"
        brings += "" if step.holds else ", and does not hold"
        table.add_row(step.what, f"{before} → {after}", brings, step.flag)
    return table


def memory_table(m: Mapping[str, Any], positions: int) -> Table:
    """Return the bytes on one device; ``m``: a `MemoryPlan` as a dict, ``positions``: the model's."""
    table = Table("memory of one device", "GiB", "", box=None, pad_edge=False)
    for name in ("weights", "draft", "activations", "workspace", "graphs", "prefix"):
        if m[name] or name not in ("draft", "prefix"):
            table.add_row(name, f"{m[name] / GIB:.2f}", "")
    requests = f"{m['max_requests']:,} requests of {m['context']:,} tokens" if m["fits"] else "does not fit"
    table.add_row("left for K and V", f"{m['kv_pool'] / GIB:.2f}", requests)
    if m["fits"]:
        limit = "as the model's positions" if m["max_context"] == positions else "one request alone"
        table.add_row("largest context", "", f"{m['max_context']:,} tokens, {limit}")
    table.add_row("device", f"{m['capacity'] / GIB:.2f}", f"{m['usable'] / GIB:.2f} used")
    table.add_row("K and V per token, whole model", "", f"{m['kv_bytes_per_token']:,} bytes")
    table.add_row("K and V per request, whole model", f"{m['kv_bytes_per_request'] / GIB:.2f}", "")
    return table


def speed_table(data: Mapping[str, Any], engines: dict[str, Figures]) -> Table:
    """Return latencies, throughput, SLO and cost; ``data``: the plan as a dict, ``engines``: see `by_engine`."""
    p, load, cost = data["predicted"], data["load"], data["cost"]
    how = f"{load['rate']:g} requests/s" if load["rate"] else _clients(load["concurrency"])
    table = Table(f"predicted at {how}, {load['isl']} in, {load['osl']} out", "", box=None, pad_edge=False)
    endless = "grows without bound: more requests arrive than can be served"
    ttft = endless if p["ttft_ms"] is None else f"{p['ttft_ms']:.0f} ms"
    table.add_row("TTFT (mean)", ttft + _range(engines, "ttft_ms", p["ttft_ms"], ".0f"))
    table.add_row("TPOT (mean)", f"{p['tpot_ms']:.1f} ms" + _range(engines, "tpot_ms", p["tpot_ms"], ".1f"))
    if p["e2el_ms"] is not None:
        table.add_row(
            "E2EL (mean)", f"{p['e2el_ms']:,.0f} ms" + _range(engines, "e2el_ms", p["e2el_ms"], ",.0f")
        )
    running = p["running"] / data["split"]["dp"]
    table.add_row("running, of at most", f"{running:.1f} of {p['max_batch']:,} in a replica")
    table.add_row(
        "prompt, decode step", f"{p['prefill_ms']:.1f} ms (among decodes), {p['decode_step_ms']:.1f} ms"
    )
    table.add_row("throughput", f"{p['requests_per_s']:.2f} requests/s, {p['input_tokens_per_s']:,.0f} tokens/s in, "
                  f"{p['output_tokens_per_s']:,.0f} out")  # fmt: skip
    if p["knee_per_s"] is not None:
        slo = "held" if p["meets_slo"] else "[red]not held[/red]"
        goodput = f"goodput {p['goodput_per_s']:.2f} requests/s, knee at {p['knee_per_s']:.2f}"
        table.add_row("SLO", f"{slo}; {goodput}")
        if p["devices_needed"] is not None:
            table.add_row("", f"the fewest devices that hold it: {p['devices_needed']}")
    if cost and cost["usd_per_hour"] is not None:
        million = f"${cost['usd_per_million_input']:.3f} in, ${cost['usd_per_million_output']:.3f} out"
        hour = f"${cost['usd_per_hour']:.2f} per hour"
        table.add_row("cost", f"{hour}; per million tokens {million} ({cost['price_source']})")
    else:
        table.add_row("cost", "unknown: the table has no price")
    return table


def _range(engines: dict[str, Figures], name: str, own: float | None, form: str) -> str:
    """Return the range over the engines that were measured, where the plan names none."""
    ends = spread(engines, name, own)
    if ends is not None:
        return f"; {ends[0]:{form}} … {ends[1]:{form}} ms by engine"
    endless = [engine for engine, figures in engines.items() if figures[name] is None]
    return f"; without bound by {', '.join(endless)}" if endless and own is not None else ""


def _clients(count: int) -> str:
    return f"{count} client{'s' * (count > 1)}"


def search_table(search: Found) -> Table:
    """Return a table of the simulated settings, the cheapest first."""
    table = Table(
        "TP", "replicas", "chunk", "USD/h", "within SLO", "TTFT p95", "TPOT p95", box=None, pad_edge=False
    )
    for tried in sorted(search.tried, key=lambda t: (t.cost, -t.share)):
        s, style = tried.setting, "bold" if tried is search.best else ""
        usd = "unknown" if tried.usd_per_hour is None else f"{tried.usd_per_hour:.2f}"
        late = [f"{ms:.0f} ms" if ms is not None else "" for ms in (tried.ttft_p95_ms, tried.tpot_p95_ms)]
        cells = (str(s.tp), str(s.replicas), str(s.max_num_batched_tokens), usd, f"{tried.share:.1%}", *late)
        table.add_row(*cells, style=style)
    return table
