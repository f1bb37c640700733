"""The experiments that ship with Quire: data in ``scenarios/``, run and plotted here.

A scenario is a base of flags of `quire simulate`, variants that change some of them, and values of one flag along the x
axis. Every (variant, value) is one simulation.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from quire.args import EngineArgs, make_args
from quire.bench.args import SIMULATED, ServeBenchArgs, SimulateArgs
from quire.bench.figures import Series, chart
from quire.bench.page import Section, console, finite, html_page, print_table, write
from quire.bench.progress import ticking
from quire.bench.runs import make_workload
from quire.errors import ConfigError, nearest
from quire.sim.run import simulate, summary_of
from quire.sim.setup import set_up
from quire.workload.slo import Slo

# In teaching order: each scenario answers a question that the previous one leaves open.
SCENARIOS = (
    "static-batching", "continuous-batching", "prefix-caching", "speculation", "scale-out", "autoscale",
    "breaking-point", "model-size-wall",
)  # fmt: skip
_COLUMNS = {
    "requests/s": "requests_per_s", "goodput/s": "goodput_per_s", "tokens/s": "output_tokens_per_s",
    "TTFT p50": "ttft_ms.p50", "TTFT p95": "ttft_ms.p95", "TPOT p50": "tpot_ms.p50", "TPOT p95": "tpot_ms.p95",
    "cached": "num_cached_tokens",
}  # fmt: skip
Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One experiment, as its file describes it."""

    name: str
    title: str
    question: str
    answer: str
    x: str  # the flag along the x axis
    values: tuple[Any, ...]
    charts: tuple[str, ...]  # keys of the summary, such as "ttft_ms.p50"
    base: Mapping[str, Any]
    variants: tuple[Mapping[str, Any], ...]  # each with a name
    scaled: tuple[str, ...] = ()  # flags of the base that are multiplied by the value of x
    columns: Mapping[str, str] = field(default_factory=dict)  # further ones: heading → key of the summary


def load_scenario(name: str) -> Scenario:
    """Return the scenario of that name.

    Raises:
        ConfigError: the scenario does not exist; the message lists those that do.
    """
    if name not in SCENARIOS:
        raise ConfigError(
            f"scenario {name!r} does not exist{nearest(name, SCENARIOS)}; there are: {', '.join(SCENARIOS)}"
        )
    data = tomllib.loads((files("quire.sim") / "scenarios" / f"{name}.toml").read_text())
    data |= {key: tuple(data.get(key, ())) for key in ("values", "charts", "variants", "scaled")}
    return Scenario(name=name, **data)


def run_scenario(name: str, settings: Mapping[str, Any]) -> int:
    """Run one scenario, or all; ``settings`` (those given by flag) replace the base of the file.

    Raises:
        ConfigError: the scenario does not exist, or a flag is wrong.
    """
    if name == "list":
        for known in SCENARIOS:
            print(f"{known:20} {load_scenario(known).question}")
        return 0
    files_of = {key: settings.get(key) for key in ("json", "html")}
    given = {k: v for k, v in settings.items() if k not in ("scenario", "json", "html", "jsonl")}
    scenario = load_scenario(name)
    results: dict[tuple[str, Any], Summary] = {}
    todo = [(variant, value) for variant in scenario.variants for value in scenario.values]
    with ticking(lambda s: f"… {len(results)} of {len(todo)} runs after {s:.0f} s"):
        for variant, value in todo:
            results[variant["name"], value] = run_one(scenario, variant, value, given)
    _show(scenario, results)
    if files_of["json"]:
        rows = [{"variant": v, scenario.x: x, **summary} for (v, x), summary in results.items()]
        text = json.dumps(finite({"scenario": name, "title": scenario.title, "runs": rows}), indent=2)
        write(files_of["json"], text + "\n")
    if files_of["html"]:
        write(files_of["html"], page_of(scenario, results))
    return 0


def run_one(scenario: Scenario, variant: Mapping[str, Any], value: Any, given: Mapping[str, Any]) -> Summary:
    """Simulate one variant at one value. A run whose model does not fit gives ``{"error": why}``."""
    flags = {k: v for k, v in variant.items() if k != "name"}
    settings = {**scenario.base, **given, **flags, scenario.x: value}
    settings |= {name: settings[name] * value for name in scenario.scaled}
    parts = {
        kind: {k: v for k, v in settings.items() if k in kind.__dataclass_fields__}
        for kind in (SimulateArgs, ServeBenchArgs)
    }
    unknown = set(settings) - set(EngineArgs.__dataclass_fields__).union(*parts.values())
    if unknown:
        raise ConfigError(f"scenario {scenario.name}: no flag is called {sorted(unknown)[0]!r}")
    args = make_args(SimulateArgs, parts[SimulateArgs], origin=scenario.name)
    bench = make_args(ServeBenchArgs, parts[ServeBenchArgs], origin=scenario.name)
    slo = Slo.parse(bench.slo) if bench.slo else None
    try:
        setup = set_up(args, bench, {k: v for k, v in settings.items() if k in SIMULATED})
    except ConfigError as error:
        return {"error": str(error)}
    workload = make_workload(bench)
    return summary_of(simulate(setup.config, setup.step_time, workload, scaling=setup.scaling), slo, workload)


def _load_of(scenario: Scenario) -> str:
    """Return a line on the flags that grow with x, "" if none do."""
    grown = [f"{name} = {scenario.base[name]:g} × {scenario.x}" for name in scenario.scaled]
    return f"The offered load grows with the {scenario.x}: {', '.join(grown)}.\n" if grown else ""


def value_of(summary: Summary, key: str) -> float | None:
    """Return ``ttft_ms.p50`` of a summary, or None where the run could not be set up."""
    found: Any = summary
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return None if found is None else float(found)


def page_of(scenario: Scenario, results: Mapping[tuple[str, Any], Summary]) -> str:
    """Return the report: question, answer, plots, and every figure."""
    plots = [_chart(scenario, results, key) for key in scenario.charts]
    columns = {**_COLUMNS, **scenario.columns}
    table = (("variant", scenario.x, *columns), _rows(results, columns))
    sections = [
        Section(text=f"{scenario.question} {_load_of(scenario)}".strip()),
        Section(text=scenario.answer, plots=plots),
        Section(tables=[table]),
    ]
    return html_page(scenario.title, sections)


def _chart(scenario: Scenario, results: Mapping[tuple[str, Any], Summary], key: str) -> str:
    title = key.replace("_ms", " ms").replace("_per_s", "/s").replace("_", " ").replace(".", ", ")
    numbers = all(isinstance(value, int | float) for value in scenario.values)
    places = scenario.values if numbers else range(1, len(scenario.values) + 1)
    x_title = scenario.x.replace("_", " ")
    if not numbers:
        x_title += ": " + ", ".join(f"{place} {value}" for place, value in enumerate(scenario.values, 1))
    series = []
    for variant in scenario.variants:
        values = [value_of(results[variant["name"], x], key) for x in scenario.values]
        known = [(float(x), y) for x, y in zip(places, values, strict=True) if y is not None]
        series.append(Series(variant["name"], [x for x, _ in known], [y for _, y in known], "points"))
    return chart(series, title=title, x=x_title, y=title)


def _rows(results: Mapping[tuple[str, Any], Summary], columns: Mapping[str, str]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for (variant, x), summary in results.items():
        if "error" in summary:
            rows.append([variant, x, "does not fit", *[""] * (len(columns) - 1)])
        else:
            rows.append([variant, x, *(value_of(summary, key) for key in columns.values())])
    return rows


def _show(scenario: Scenario, results: Mapping[tuple[str, Any], Summary]) -> None:
    out = console()
    out.print(f"[bold]{scenario.title}[/bold]\n{scenario.question}\n{_load_of(scenario)}", highlight=False)
    columns = {**_COLUMNS, **scenario.columns}
    print_table(out, ("variant", scenario.x, *columns), _rows(results, columns))
    steps = sum(s["simulation"]["num_steps"] for s in results.values() if "simulation" in s)
    out.print(f"\n{scenario.answer}\n{steps:,} steps planned by the scheduler", highlight=False)
