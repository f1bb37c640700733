"""What `quire plan` and `quire simulate` answer, as pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from quire.units import GIB
from quire_lab.learn.picture import Axis, Bars, Fact, Facts, Line, Lines, Part, Picture, Table

Said = Mapping[str, Any]
_MEMORY = {
    "weights": "weights", "draft": "draft model", "activations": "activations", "workspace": "workspace",
    "graphs": "recorded steps", "kv": "KV of the running requests", "free": "left for more requests",
}  # fmt: skip
_TIMES = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "whole answer"}
_OBJECTIVES = {
    "throughput": Axis("requests that it can take", "requests/s"),
    "latency": Axis("time of a whole answer", "ms"),
    "cost": Axis("cost", "USD per million output tokens"),
}
_SHARE = Axis("share of the requests that are as fast", "%")
_OFFERED = Axis("offered load", "requests/s")


class Request(msgspec.Struct, frozen=True):
    """A request that was simulated, as a line of ``--jsonl``; times are in seconds."""

    arrival_s: float
    end_s: float | None = None
    first_token_s: float | None = None
    num_output_tokens: int = 0


def plan_picture(report: Said) -> Picture:
    """Return the picture of the JSON of ``quire plan``."""
    device = report["hardware"]
    title = f"{report['model']} on {device['count']} × {device['title']}: {_verdict(report)}"
    parts: list[Part] = []
    predicted = report.get("predicted")
    if predicted:
        parts += [_plan_facts(report, predicted), *_latencies(report, predicted)]
    parts.append(_memory(report))
    if report.get("advice"):
        parts.append(_advice(report))
    parts.append(Table("How the split was chosen", ("",), tuple((reason,) for reason in report["reasons"])))
    for name, heading in (("explain", "Where the figures come from"), ("compare", "Beside the other plan")):
        if report.get(name):
            parts.append(_table(heading, report[name]))
    if report.get("search"):
        parts.append(_table("Settings that were simulated", report["search"]["tried"]))
    return Picture(title, tuple(parts))


def _verdict(report: Said) -> str:
    if not report["fits"]:
        return "it does not fit"
    predicted = report.get("predicted") or {}
    if predicted.get("saturated"):
        return "it fits, and the load is more than it can take"
    if predicted.get("meets_slo") is None or not report.get("slo"):
        return "it fits"
    return "it fits and holds the targets" if predicted["meets_slo"] else "it fits, and misses the targets"


def _plan_facts(report: Said, predicted: Said) -> Facts:
    split = {name: size for name, size in report["split"].items() if size > 1} if report.get("split") else {}
    facts = [
        Fact("Requests that run at once", predicted["running"]),
        Fact("Tokens that it generates", predicted["output_tokens_per_s"], "tokens/s"),
        Fact("Split of the model", ", ".join(f"{k.upper()}{v}" for k, v in split.items()) or "none"),
        Fact("Weights and KV cache in", f"{report['weights']}, {report['kv_dtype']}"),
    ]
    if predicted.get("knee_per_s") is not None:
        facts.insert(0, Fact("Requests that it can take, at most", predicted["knee_per_s"], "requests/s"))
    cost = report.get("cost") or {}
    if cost.get("usd_per_hour") is not None:
        facts.append(
            Fact(
                "Price of the devices", cost["usd_per_hour"], f"USD an hour ({cost.get('price_source', '')})"
            )
        )
    if cost.get("usd_per_million_output") is not None:
        facts.append(Fact("Price of a million output tokens", cost["usd_per_million_output"], "USD"))
    facts.append(Fact("To serve it so", report["command"]))
    facts += [Fact("Remark", remark) for remark in report.get("remarks", ())]
    return Facts("What to expect", tuple(facts))


def _latencies(report: Said, predicted: Said) -> Iterable[Bars]:
    """Yield a request's time by its parts, and each latency that has a target beside it; all are means."""
    first, total = predicted["ttft_ms"], predicted["e2el_ms"]
    parts = {"to the first token": (first,), "further tokens": (total - first,)}
    yield Bars("One request", Axis("mean time", "ms"), ("a request",), parts, stacked=True)
    limits = report.get("slo") or {}
    for key, title in _TIMES.items():
        if limits.get(f"{key}_ms") is not None:
            bars = {"predicted": (predicted[f"{key}_ms"],), "target, at most": (limits[f"{key}_ms"],)}
            yield Bars(title.capitalize(), Axis(f"mean {title}", "ms"), ("",), bars)


def _memory(report: Said) -> Bars:
    memory = dict(report["memory"])
    running = (report.get("predicted") or {}).get("running") or 0.0
    pool, per_request = memory.get("kv_pool") or 0, memory.get("kv_request_share") or 0
    memory["kv"] = max(0.0, min(pool, running * per_request))
    memory["free"] = max(0.0, pool - memory["kv"])
    bars = {title: (memory[key] / GIB,) for key, title in _MEMORY.items() if memory.get(key)}
    used = sum(value[0] for value in bars.values())
    if (rest := memory["capacity"] / GIB - used) > 0:
        bars["not used by the server"] = (rest,)
    title = f"Memory of one device: {memory['capacity'] / GIB:.0f} GiB"
    return Bars(title, Axis("memory", "GiB"), (report["hardware"]["name"],), bars, stacked=True)


def _advice(report: Said) -> Bars:
    axis = _OBJECTIVES[report["objective"]]
    steps = report["advice"]
    bars = {"now": tuple(s["before"] for s in steps), "then": tuple(s["after"] for s in steps)}
    return Bars("What would help", axis, tuple(s["what"] for s in steps), bars)


def _table(title: str, rows: Sequence[Said]) -> Table:
    """Return a table of like rows."""
    keys = [key for key in rows[0] if any(_cell(row.get(key)) for row in rows)]
    header = tuple(key.replace("_", " ") for key in keys)
    return Table(title, header, tuple(tuple(_cell(row.get(key)) for key in keys) for row in rows))


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(str(_cell(item)) for item in value)
    return "" if value is None else value


def simulate_picture(report: Said, requests: Sequence[Request]) -> Picture:
    """Return the picture of the JSON of ``quire simulate``; ``requests``: the lines of its ``--jsonl``."""
    if "scenario" in report:
        return _scenario_picture(report)
    run = report["run"]
    done = f"{report['num_completed']:,} of {report['num_requests']:,} requests completed"
    title = f"{run['model']} on {run['machine']}: {done}"
    parts: list[Part] = [_simulated_facts(report)]
    if report.get("sweep"):
        parts += _sweep(report)
    parts += _of_requests(report, requests)
    replicas = report["simulation"]["replicas"]
    end_s = max(report["simulation"]["end_s"], 1e-9)
    busy = tuple(100 * replica["busy_s"] / end_s for replica in replicas)
    names = tuple(f"replica {replica['replica']}" for replica in replicas)
    parts.append(
        Bars("Time in which the replicas compute", Axis("share of the time", "%"), names, {"busy": busy})
    )
    return Picture(title, tuple(parts))


def _simulated_facts(report: Said) -> Facts:
    facts = [
        Fact("Requests completed", report["requests_per_s"], "requests/s"),
        Fact("Of these within the targets", report["goodput_per_s"], "requests/s"),
        Fact("Tokens generated", report["output_tokens_per_s"], "tokens/s"),
        Fact("KV cache in use at its peak", 100 * report["simulation"]["kv_peak"], "%"),
        Fact("Simulated time", report["duration_s"], "s"),
        Fact("Step times from", report["run"].get("step times", "")),
    ]
    if report["num_failed"]:
        facts.append(Fact("Requests that failed", report["num_failed"]))
    if report.get("knee_per_s"):
        facts.insert(0, Fact("Goodput falls beyond", report["knee_per_s"], "requests/s offered"))
    return Facts("What came out", tuple(facts))


def _sweep(report: Said) -> list[Part]:
    points = sorted(report["sweep"], key=lambda point: point["offered_per_s"])
    x = tuple(point["offered_per_s"] for point in points)
    marks = ((report["knee_per_s"], "knee"),) if report.get("knee_per_s") else ()

    def line(name: str, key: str, part: str | None = None) -> Line:
        return Line(name, x, tuple(point[key] if part is None else point[key][part] for point in points))

    return [
        Lines(
            "Throughput as the load rises", _OFFERED, Axis("requests", "requests/s"),
            (line("completed", "requests_per_s"), line("within the targets", "goodput_per_s")), marks,
        ),
        Lines(
            "Latency as the load rises", _OFFERED, Axis("time", "ms", log=True),
            (
                line("first token, p50", "ttft_ms", "p50"), line("first token, p99", "ttft_ms", "p99"),
                line("per output token, p99", "tpot_ms", "p99"),
            ), marks,
        ),
    ]  # fmt: skip


def _of_requests(report: Said, requests: Sequence[Request]) -> list[Part]:
    """Return how fast the requests were, and how many were under way at each time."""
    done = [r for r in requests if r.first_token_s is not None and r.end_s is not None]
    if not done:
        return []
    first = [1e3 * (r.first_token_s - r.arrival_s) for r in done if r.first_token_s is not None]
    totals = [1e3 * (r.end_s - r.arrival_s) for r in done if r.end_s is not None]
    per_token = [
        (totals[i] - first[i]) / (r.num_output_tokens - 1)
        for i, r in enumerate(done)
        if r.num_output_tokens > 1
    ]
    values = {"first token": first, "per output token": per_token, "whole answer": totals}
    limits = report.get("slo") or {}
    marks = tuple((limits[f"{key}_ms"], f"{key.upper()} target") for key in _TIMES if limits.get(f"{key}_ms"))
    curves = tuple(_distribution(name, series) for name, series in values.items() if series)
    begins = [r.arrival_s for r in done]
    begun, ends = (
        [t + value / 1e3 for t, value in zip(begins, series, strict=True)] for series in (first, totals)
    )
    return [
        Lines("How fast the requests were", Axis("time", "ms", log=True), _SHARE, curves, marks),
        Lines(
            "Requests under way", Axis("simulated time", "s"), Axis("requests"),
            (_level("wait for the first token", begins, begun), _level("get tokens", begun, ends)),
        ),
    ]  # fmt: skip


_MAX_POINTS = 400


def _distribution(name: str, values: Sequence[float]) -> Line:
    ordered = sorted(values)
    every = max(1, len(ordered) // _MAX_POINTS)
    places = [*range(0, len(ordered), every), len(ordered) - 1]
    y = tuple(100 * (i + 1) / len(ordered) for i in places)
    return Line(name, tuple(max(ordered[i], 1e-3) for i in places), y, "steps")


def _level(name: str, begins: Sequence[float], ends: Sequence[float]) -> Line:
    """Return how many have begun and not ended, over time."""
    changes = sorted([(t, 1) for t in begins] + [(t, -1) for t in ends])
    level, x, y = 0, [0.0], [0.0]
    for t, change in changes:
        level += change
        x.append(t)
        y.append(float(level))
    every = max(1, len(x) // _MAX_POINTS)
    return Line(name, tuple(x[::every]), tuple(y[::every]), "steps")


def _scenario_picture(report: Said) -> Picture:
    """Return the figures of an experiment over what it varies, a curve for each variant."""
    runs = [run for run in report["runs"] if "error" not in run]
    if not runs:
        return Picture(report["title"], (_table("No run was possible", report["runs"]),))
    x_name = list(runs[0])[1]
    facts = Facts("What it shows", tuple(Fact(name, value) for name, value in report["figures"].items()))
    parts: list[Part] = [Facts("Answer", (Fact(report["answer"], ""),)), facts]
    rows = (
        ("Requests within the targets", Axis("goodput", "requests/s"), ("goodput_per_s",)),
        ("Time to first token, p50", Axis("time", "ms"), ("ttft_ms", "p50")),
        ("Time per output token, p50", Axis("time", "ms"), ("tpot_ms", "p50")),
    )
    is_number = all(isinstance(run[x_name], int | float) for run in runs)
    for title, axis, path in rows:
        parts.append((_curves if is_number else _groups)(title, axis, path, runs, x_name))
    return Picture(report["title"], tuple(parts))


def _at(run: Said, path: Sequence[str]) -> float:
    value: Any = run
    for name in path:
        value = value[name]
    return float(value) if value is not None else float("nan")


def _variants(runs: Sequence[Said]) -> list[str]:
    return list(dict.fromkeys(run["variant"] for run in runs))


def _curves(title: str, axis: Axis, path: Sequence[str], runs: Sequence[Said], x_name: str) -> Lines:
    lines = []
    for variant in _variants(runs):
        own = sorted((run for run in runs if run["variant"] == variant), key=lambda run: run[x_name])
        lines.append(Line(variant, tuple(run[x_name] for run in own), tuple(_at(run, path) for run in own)))
    return Lines(title, Axis(x_name.replace("_", " ")), axis, tuple(lines))


def _groups(title: str, axis: Axis, path: Sequence[str], runs: Sequence[Said], x_name: str) -> Bars:
    names = tuple(f"{run['variant']} {run[x_name]}" for run in runs)
    return Bars(title, axis, names, {axis.title: tuple(_at(run, path) for run in runs)})
