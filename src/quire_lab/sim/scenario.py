"""The experiments that ship with Quire: data in ``scenarios/``, run and plotted here.

A scenario is a base of flags of `quire simulate`, variants that change some of them, and values of one flag along the x
axis. Every (variant, value) is one simulation.
"""

from __future__ import annotations

import json
import math
import operator
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, nearest
from quire_lab.bench.figures import Series, chart
from quire_lab.bench.page import Section, console, finite, html_page, print_table, write
from quire_lab.bench.progress import ticking
from quire_lab.sim.setup import ModelDoesNotFit, prepare

# In teaching order: each scenario answers a question that the previous one leaves open.
SCENARIOS = (
    "static-batching", "continuous-batching", "prefix-caching", "speculation", "scale-up", "scale-out",
    "parallel", "autoscale", "breaking-point", "model-size-wall", "whole-stack",
)  # fmt: skip
_COLUMNS = {
    "requests/s": "requests_per_s", "goodput/s": "goodput_per_s", "tokens/s": "output_tokens_per_s",
    "TTFT p50": "ttft_ms.p50", "TTFT p95": "ttft_ms.p95", "TPOT p50": "tpot_ms.p50", "TPOT p95": "tpot_ms.p95",
    "cached": "num_cached_tokens",
}  # fmt: skip
_LISTS = ("values", "charts", "variants", "scaled", "claims")
_CHARTS = ("output_tokens_per_s", "ttft_ms.p50", "tpot_ms.p50")  # for a user's file that names none
Summary = Mapping[str, Any]
Results = Mapping[tuple[str, Any], Summary]  # (variant, value of x) → summary


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
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name → see `figures_of`
    claims: tuple[str, ...] = ()  # required of the figures, such as "gain >= 1.5"
    columns: Mapping[str, str] = field(default_factory=dict)  # further ones: heading → key of the summary


def load_scenario(name: str) -> Scenario:
    """Return the scenario of that name.

    Raises:
        ConfigError: the scenario does not exist; the message lists those that do.
    """
    if name.endswith(".toml"):
        return _own(Path(name))
    if name not in SCENARIOS:
        raise ConfigError(
            f"scenario {name!r} does not exist{nearest(name, SCENARIOS)}; there are: {', '.join(SCENARIOS)}, or a "
            "file FILE.toml (docs/simulator.md)"
        )
    return _made(name, tomllib.loads((files("quire_lab.sim") / "scenarios" / f"{name}.toml").read_text()))


def _made(name: str, data: dict[str, Any]) -> Scenario:
    return Scenario(name=name, **data | {key: tuple(data.get(key, ())) for key in _LISTS})


def _own(path: Path) -> Scenario:
    """Return the scenario of a person's file, in which only ``x``, ``values`` and ``variants`` must be."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--scenario {path}: cannot be read ({error})") from error
    known = {f.name for f in fields(Scenario)} - {"name"}
    for key in data:
        if key not in known:
            raise ConfigError(f"--scenario {path}: unknown key {key!r}{nearest(key, known)}")
    for key in ("x", "values", "variants"):
        if not data.get(key):
            raise ConfigError(f"--scenario {path}: {key} is missing")
    if not all(isinstance(variant, dict) and variant.get("name") for variant in data["variants"]):
        raise ConfigError(f"--scenario {path}: every variant is a table with a name")
    data = {"title": path.stem, "question": "", "answer": "", "base": {}, "charts": _CHARTS} | data
    return _made(path.stem, data)


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
    flags = {k: v for k, v in settings.items() if k not in ("scenario", "json", "html", "jsonl")}
    scenario = load_scenario(name)
    results: dict[tuple[str, Any], Summary] = {}
    todo = [(variant, value) for variant in scenario.variants for value in scenario.values]
    with ticking(lambda s: f"… {len(results)} of {len(todo)} runs after {s:.0f} s"):
        for variant, value in todo:
            results[variant["name"], value] = run_one(scenario, variant, value, flags)
    _show(scenario, results)
    if files_of["json"]:
        rows = [{"variant": v, scenario.x: x, **summary} for (v, x), summary in results.items()]
        head = {
            "scenario": scenario.name,
            "title": scenario.title,
            "answer": scenario_answer(scenario, results)[0],
        }
        figures = figures_of(scenario, results)
        text = json.dumps(finite({**head, "figures": figures, "runs": rows}), indent=2)
        write(files_of["json"], text + "\n")
    if files_of["html"]:
        write(files_of["html"], scenario_page(scenario, results))
    return 0


def run_one(scenario: Scenario, variant: Mapping[str, Any], value: Any, shared: Mapping[str, Any]) -> Summary:
    """Simulate one variant at one value. A run whose model does not fit gives ``{"error": why}``."""
    flags = {k: v for k, v in variant.items() if k != "name"}
    settings = {**scenario.base, **shared, **flags, scenario.x: value}
    settings |= {name: settings[name] * value for name in scenario.scaled}
    try:
        ready = prepare(settings, scenario.name)
    except ModelDoesNotFit as error:
        return {"error": str(error)}
    return ready.run()[1]


def _load_of(scenario: Scenario) -> str:
    """Return a line on the flags that grow with x, "" if none do."""
    grown = [f"{name} = {scenario.base[name]:g} × {scenario.x}" for name in scenario.scaled]
    return f"The offered load grows with the {scenario.x}: {', '.join(grown)}.\n" if grown else ""


def value_of(summary: Summary, key: str) -> float | None:
    """Return ``ttft_ms.p50`` of a summary, or None where the run could not be set up."""
    value: Any = summary
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def figures_of(scenario: Scenario, results: Results) -> dict[str, float]:
    """Return the figures by which a scenario answers, from the results of its own runs.

    A figure is ``{of = VARIANT, at = VALUE, key = KEY}``, divided by the same of ``over`` (a variant, at the same
    value) or of ``over_at`` (the same variant at another value). ``at`` may be left out where x has one value.
    ``best_of``: the largest over all values of x. What was not run or did not fit is NaN.
    """
    figures = {}
    for name, spec in scenario.figures.items():
        of, at, key = spec.get("of", spec.get("best_of")), spec.get("at", scenario.values[0]), spec["key"]

        def value(variant: str, x: Any, key: str = key, best: bool = "best_of" in spec) -> float:
            places = scenario.values if best else (x,)
            all_values = (value_of(results.get((variant, place), {}), key) for place in places)
            return max((value for value in all_values if value is not None), default=math.nan)

        figure = value(of, at)
        if "over" in spec or "over_at" in spec:
            below = value(spec.get("over", of), spec.get("over_at", at))
            figure = figure / below if below else math.nan
        figures[name] = figure
    return figures


_OPERATORS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


def scenario_answer(scenario: Scenario, results: Results) -> tuple[str, list[str]]:
    """Return the answer with its figures, and a sentence for each claim that does not hold of these runs."""
    figures = figures_of(scenario, results)
    false = []
    for claim in scenario.claims:
        name, sign, limit = claim.split()
        if not _OPERATORS[sign](figures[name], figures[limit] if limit in figures else float(limit)):
            false.append(f" Not so in these runs: {claim} ({name} = {figures[name]:.3g}).")
    return scenario.answer.format(**figures), false


def scenario_page(scenario: Scenario, results: Results) -> str:
    """Return the report: question, answer, plots, and every figure."""
    plots = [_chart(scenario, results, key) for key in scenario.charts]
    columns = {**_COLUMNS, **scenario.columns}
    facts, false = scenario_answer(scenario, results)
    table = (("variant", scenario.x, *columns), _rows(results, columns))
    sections = [
        Section(text=f"{scenario.question} {_load_of(scenario)}".strip()),
        Section(text="".join((facts, *false)), plots=plots),
        Section(tables=[table]),
    ]
    return html_page(scenario.title, sections)


def _chart(scenario: Scenario, results: Results, key: str) -> str:
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


def _rows(results: Results, columns: Mapping[str, str]) -> list[list[Any]]:
    rows: list[list[Any]] = []
    for (variant, x), summary in results.items():
        if "error" in summary:
            rows.append([variant, x, "does not fit", *[""] * (len(columns) - 1)])
        else:
            rows.append([variant, x, *(value_of(summary, key) for key in columns.values())])
    return rows


def _show(scenario: Scenario, results: Results) -> None:
    out = console()
    out.print(f"[bold]{scenario.title}[/bold]\n{scenario.question}\n{_load_of(scenario)}", highlight=False)
    columns = {**_COLUMNS, **scenario.columns}
    print_table(out, ("variant", scenario.x, *columns), _rows(results, columns))
    facts, false = scenario_answer(scenario, results)
    steps = sum(s["simulation"]["num_steps"] for s in results.values() if "simulation" in s)
    out.print(f"\n{facts}{''.join(false)}\n{steps:,} steps planned by the scheduler", highlight=False)
