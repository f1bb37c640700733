"""`quire bench speculate`: what drafts give, beside what theory expects, in one engine and one run.

One engine decodes the same batches plainly, with each fixed number of drafts γ, and with the number that the engine
chooses; rounds of all settings alternate, so that a busy machine is unfair to none, and medians count. Leviathan et al.
2023: with acceptance α, a round gives (1 − α^(γ+1)) / (1 − α) tokens; it takes γ·c + v plain steps, where c is the time
of a draft step and v that of verifying γ + 1 tokens, in decode steps. The textbook has v = 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.config import AUTO_DRAFTS, MAX_DRAFTS
from quire.device import cpu_name
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.metrics.engine_stats import EngineStats
from quire.scheduler.settings import PolicyChange
from quire.step import StepResult
from quire_lab.bench.args import SpeculateBenchArgs, with_workload
from quire_lab.bench.offline import OfflineEngine
from quire_lab.bench.page import console, write
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import Fixed


class CpuClock(WallClock):
    """Seconds of processor time of this process, which other processes do not lengthen; for one thread."""

    def now(self) -> float:
        return time.process_time()


@dataclass(slots=True)
class Setting:
    """What one batch size gave under one number of drafts. ``drafts``: 0 for plain decoding, None for auto."""

    batch: int
    drafts: int | None
    tokens_per_s: float
    speedup: float = 1.0
    alphas: tuple[float, ...] = ()  # share accepted of the drafts reached, by position
    tokens_per_round: float = 1.0
    expected_tokens: float = 1.0  # (1 − α^(γ+1)) / (1 − α)
    c: float = 0.0
    v: float = 1.0
    expected_speedup: float = 1.0  # measured tokens per round / (γ·c + v)
    textbook: float = 1.0  # the same with v = 1
    first_speedup: float | None = None  # auto: its learning round, in no other figure

    @property
    def name(self) -> str:
        return "auto" if self.drafts is None else "plain" if self.drafts == 0 else f"γ = {self.drafts}"


class DraftTime:
    """Adds up the seconds in which an executor's drafts were made."""

    def __init__(self, executor: Executor) -> None:
        self.seconds = 0.0
        self._collect = executor.collect
        executor.collect = self.collect  # type: ignore[method-assign]

    def collect(self) -> StepResult:
        result = self._collect()
        self.seconds += result.draft_s
        return result


@dataclass(slots=True)
class Round:
    """One batch: its seconds, those in which drafts were made, its decode steps, and the counters that it moved."""

    seconds: float
    draft_s: float
    num_steps: int
    num_rounds: int  # verifications
    num_drafted: int
    accepted_at: tuple[int, ...]


def speculate(engine_args: EngineArgs, args: SpeculateBenchArgs) -> int:
    """Print the table; write it and the plot where asked."""
    args = with_workload(args)
    counts, batches = _numbers(args.drafts, "drafts"), _numbers(args.batch_sizes, "batch_sizes")
    if max(counts) > MAX_DRAFTS:
        raise ConfigError(f"drafts = {args.drafts!r} must be numbers in 1…{MAX_DRAFTS}")
    most = max(AUTO_DRAFTS, *counts)
    # Without prefix caching: the first setting would compute the prompts of all.
    engine = OfflineEngine(
        replace(engine_args, spec_tokens=most, enable_prefix_caching=False),
        clock=CpuClock() if args.clock == "cpu" else None,
    )
    drafting = DraftTime(engine.executor)
    measured: list[Setting] = []
    for batch in batches:
        measured += _of_batch(engine, drafting, args, batch, [0, *counts, None])
    engine.close()
    out = console()
    out.print(
        f"{engine_args.model} on {cpu_name()}, {engine.info.kernels}, {args.clock} time, median of {args.rounds}"
    )
    out.print(table(measured), markup=False, soft_wrap=True)
    if args.json:
        write(args.json, json.dumps([asdict(setting) for setting in measured], indent=2) + "\n")
    if args.svg:
        write(args.svg, plot(measured))
    return 0


def _numbers(text: str, name: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(f"{name} = {text!r} must be numbers ≥ 1 with commas between them, as 2,4,8")
    return [int(part) for part in parts]


def _of_batch(
    engine: OfflineEngine, drafting: DraftTime, args: SpeculateBenchArgs, batch: int, settings: Sequence[int | None]
) -> list[Setting]:  # fmt: skip
    """Measure the ``settings`` in turns with ``batch`` sequences."""
    rounds: dict[int | None, list[Round]] = {setting: [] for setting in settings}
    for turn in range(args.rounds + 1):
        work = Synthetic(batch, Fixed(args.input_len), Fixed(args.output_len)).build(
            turn, engine.max_model_len
        )
        for setting in settings:
            most = AUTO_DRAFTS if setting is None else setting
            engine.change(PolicyChange(max_num_drafts=most, adaptive_drafts=setting is None))
            before, drafted_s = engine.stats(), drafting.seconds
            done = engine.run(work.requests, engine.prompts(turn))
            one = _round(
                before, engine.stats(), done.duration_s, drafting.seconds - drafted_s, done.num_steps
            )
            if turn:  # the first one warms up
                rounds[setting].append(one)
            else:
                first_s = one.seconds  # the last setting's: auto
    num_tokens = batch * args.output_len
    plain_s = median(round_.seconds for round_ in rounds[0])
    step_s = plain_s / args.output_len
    measured = [
        _setting(batch, setting, rounds[setting], num_tokens, plain_s, step_s) for setting in settings
    ]
    measured[-1].first_speedup = plain_s / first_s
    return measured


def _round(before: EngineStats, after: EngineStats, seconds: float, draft_s: float, num_steps: int) -> Round:
    accepted = zip(after.accepted_at, before.accepted_at or (0,) * len(after.accepted_at), strict=True)
    return Round(
        seconds,
        draft_s,
        num_steps,
        after.num_verifications - before.num_verifications,
        after.num_draft_tokens - before.num_draft_tokens,
        tuple(now - then for now, then in accepted),
    )


def _setting(
    batch: int, drafts: int | None, rounds: Sequence[Round], num_tokens: int, plain_s: float, step_s: float
) -> Setting:
    seconds = median(round_.seconds for round_ in rounds)
    setting = Setting(batch, drafts, num_tokens / seconds, plain_s / seconds)
    count = sum(round_.num_rounds for round_ in rounds)
    if not count:
        return setting
    accepted = [sum(column) for column in zip(*(round_.accepted_at for round_ in rounds), strict=True)]
    reached = [count, *accepted]
    setting.alphas = tuple(now / then for now, then in zip(accepted, reached, strict=False) if then)
    setting.tokens_per_round = 1.0 + sum(accepted) / count
    if not drafts:
        return setting
    tried = sum(reached[:drafts])
    alpha = sum(accepted) / tried if tried else 0.0
    setting.alphas = setting.alphas[:drafts]
    setting.expected_tokens = drafts + 1.0 if alpha == 1.0 else (1 - alpha ** (drafts + 1)) / (1 - alpha)
    drafted = sum(round_.num_drafted for round_ in rounds)
    steps = sum(round_.num_steps for round_ in rounds)
    setting.c = sum(round_.draft_s for round_ in rounds) / drafted * batch / step_s
    round_s = sum(round_.seconds - round_.draft_s for round_ in rounds) / steps
    setting.v = round_s / step_s
    setting.expected_speedup = setting.tokens_per_round / (drafts * setting.c + setting.v)
    setting.textbook = setting.tokens_per_round / (drafts * setting.c + 1.0)
    return setting


def table(settings: Sequence[Setting]) -> str:
    """Return the settings as a Markdown table."""
    lines = [
        "| batch | drafts | tokens/s | × plain | formula | v = 1 | tokens per round | theory | c | v | α by position "
        "| first round |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for setting in settings:
        cells: list[Any] = [
            setting.batch,
            setting.name,
            f"{setting.tokens_per_s:.0f}",
            f"{setting.speedup:.2f}",
        ]
        if setting.drafts:
            numbers = (
                setting.expected_speedup,
                setting.textbook,
                setting.tokens_per_round,
                setting.expected_tokens,
                setting.c,
                setting.v,
            )
            cells += [f"{number:.2f}" for number in numbers]
        else:
            cells += ["", "", f"{setting.tokens_per_round:.2f}", "", "", ""]
        cells.append(" ".join(f"{alpha:.2f}" for alpha in setting.alphas))
        cells.append("" if setting.first_speedup is None else f"{setting.first_speedup:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


COLOURS = ("#888888", "#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#ff7f0e")
WIDTH, HEIGHT, EDGE = 640, 400, 48  # pixels


def plot(settings: Sequence[Setting]) -> str:
    """Return an SVG of the speed-up against the batch size, one line per number of drafts."""
    batches = sorted({setting.batch for setting in settings})
    top = 1.1 * max(setting.speedup for setting in settings)
    step = (WIDTH - 2 * EDGE - 80) / max(1, len(batches) - 1)
    x = {batch: EDGE + place * step for place, batch in enumerate(batches)}

    def y(speedup: float) -> float:
        return HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * speedup / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
    ]
    parts.append('font-size="12"><rect width="100%" height="100%" fill="white"/>')
    for batch in batches:
        parts.append(f'<text x="{x[batch]:.0f}" y="{HEIGHT - EDGE + 18}" text-anchor="middle">{batch}</text>')
    for tick in range(int(2 * top) + 1):
        parts.append(f'<text x="8" y="{y(tick / 2) + 4:.0f}">{tick / 2:g}×</text>')
    for place, name in enumerate(dict.fromkeys(setting.name for setting in settings)):
        own = [setting for setting in settings if setting.name == name]
        points = " ".join(f"{x[setting.batch]:.1f},{y(setting.speedup):.1f}" for setting in own)
        colour = COLOURS[place % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        end = y(own[-1].speedup)
        parts.append(f'<text x="{x[own[-1].batch] + 6:.0f}" y="{end + 4:.0f}" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{EDGE}" y="{HEIGHT - 8}">speed-up against sequences at once</text></svg>')
    return "".join(parts) + "\n"
