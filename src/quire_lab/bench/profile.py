"""`quire profile`: measure this machine's step times, fit the cost model, save both with the cross-validated error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from quire.args import EngineArgs
from quire.clock import Clock, WallClock
from quire.config import EngineConfig
from quire.cost.cost_model import CostModel
from quire.cost.draft_cost import DraftCost, MeasuredDrafts, fit_drafts
from quire.cost.fit import FOLDS, FitError, MeasuredStep, cross_validate, fit
from quire.cost.kept_profiles import machine_of, profile_path, profiled_settings
from quire.cost.links import LinkCost, Links, RankedSteps
from quire.cost.profile import HostCost, Profile, Spread, fit_steps, read_steps
from quire.cost.ranks import cuts_rows
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.build import build_core
from quire.errors import ConfigError
from quire.parallel.topology import Topology
from quire.request import SamplingParams
from quire_lab.bench.args import ProfileArgs
from quire_lab.bench.profile_links import measure_links
from quire_lab.bench.profile_serving import LiveServer, measure_host
from quire_lab.bench.profile_steps import Case, StepProfiler, anchors, cases
from quire_lab.bench.progress import EVERY_S

MAX_KV_BYTES = 1 << 30  # K and V that the measurement writes to
FIRST_REPEATS = 3  # per case, before any case is measured at length
# Share of the time after which a visit to one case is cut short: many short visits average over a noisy machine.
SHARE = 1 / 400
# Fewest kinds of steps: a fit never leaves out those with the fewest and the most tokens.
LEAST_KINDS = FOLDS + 2
BUSY = 0.5  # load per core above which other programs disturb the times
CHANGED = 1.15  # slowest / fastest time of an anchor on an unsteady machine


def profile(engine_args: EngineArgs, args: ProfileArgs, serve_flags: Sequence[str]) -> int:
    """Measure, fit and save. ``serve_flags``: the same settings as flags of ``quire serve``.

    The file is written as soon as the steps are fitted, and again with each part that is measured after them. Return
    the exit status: 1 where such a part failed, 130 after Ctrl-C, which fits the steps measured so far.

    Raises:
        ConfigError: the file cannot be written, or the settings leave nothing to measure.
    """
    config, checkpoint = configure(engine_args, detect_device())
    machine, settings = machine_of(config), profiled_settings(config)
    out = profile_path(config.model.name, machine, settings) if args.out is None else Path(args.out)
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {args.out}: the folder {out.absolute().parent} does not exist")
    defaults = asdict(checkpoint.generation)
    sampling = {key: value for key, value in defaults.items() if value is not None}
    steps = _logged(args.steps) if args.steps is not None else _measured(config, sampling, args.seconds)
    made = Profile(
        model=config.model.name,
        machine=machine,
        settings=settings | {"sampling": sampling},
        executor=steps.executor,
        host=steps.host or HostCost(),
        error=_error(steps.points),
        points=steps.points,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        spread=steps.spread,
        draft=steps.draft,
    )
    made.save(out)
    status = 130 if steps.is_cut else 0
    for what, measure in _parts(config, args, serve_flags, steps.host) if not steps.is_cut else ():
        try:
            made = measure(made)
        except (Exception, KeyboardInterrupt) as error:
            why = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
            _say(f"warning: {what} could not be measured ({why}): the profile is without it")
            status = 1
            continue
        made.save(out)
    _say(report(made))
    for warning in warnings_of(made):
        _say(f"warning: {warning}")
    finds = " quire serve --slo, plan and simulate find it there." if args.out is None else ""
    _say(f"written to {out}.{finds}" if finds else f"written to {out}")
    return status


@dataclass(frozen=True, slots=True)
class _Steps:
    """The fitted steps of the engine."""

    executor: CostModel
    points: tuple[MeasuredStep, ...]
    host: HostCost | None = None  # the engine's own part of it, that a step log has
    draft: DraftCost | None = None
    spread: Spread | None = None
    is_cut: bool = False  # interrupted by Ctrl-C


def _logged(path: str) -> _Steps:
    fit = fit_steps(read_steps(Path(path)))
    return _Steps(fit.executor, fit.points, fit.host, fit.draft)


def _measured(config: EngineConfig, chosen: Mapping[str, Any], seconds: float) -> _Steps:
    _warn_if_busy()
    sampling = SamplingParams(max_tokens=None, seed=1, **chosen)
    points, drafts, spread = measure_steps(config, sampling, seconds, WallClock())
    return _Steps(fit(points), tuple(points), draft=fit_drafts(drafts), spread=spread, is_cut=spread is None)


def _error(points: Sequence[MeasuredStep]) -> FitError | None:
    try:
        return cross_validate(points)
    except ConfigError as error:
        _say(f"warning: {error}; the profile has no error of its own")
        return None


Part = tuple[str, Callable[[Profile], Profile]]


def _parts(
    config: EngineConfig, args: ProfileArgs, serve_flags: Sequence[str], loop: HostCost | None
) -> Iterator[Part]:
    """Yield what is measured after the steps: its name, and what adds it to a profile."""

    def with_host(made: Profile) -> Profile:
        host = _host(config, made.executor, serve_flags)
        if loop is not None:
            # The log has the engine's own part; only a client sees the time around it.
            host = replace(loop, request_s=host.request_s, per_prompt_token_s=host.per_prompt_token_s)
        return replace(made, host=host)

    def with_ranked(made: Profile) -> Profile:
        links = made.links
        return (
            made
            if links is None
            else replace(made, ranked=_ranked(config, made.executor, links, serve_flags))
        )

    if args.serving:
        yield "the server around the steps", with_host
    if args.parallel:
        yield "the links between two ranks", lambda made: replace(made, links=_links())
    if args.serving and args.parallel:
        yield "a server of two ranks", with_ranked


def measure_steps(
    config: EngineConfig, sampling: SamplingParams, seconds: float, clock: Clock
) -> tuple[list[MeasuredStep], list[MeasuredDrafts], Spread | None]:
    """Time the grid on the real executor: once by rising cost, then in random order for about ``seconds``.

    A few cases are timed on their own at the start, in the middle and at the end: the spread of the machine's speed. It
    is None after Ctrl-C.

    Raises:
        ConfigError: the settings leave too few kinds of steps to fit anything.
    """
    page = config.kv_layout.block_bytes(config.cache.block_size, config.model.kv_dtype)
    max_blocks = min(config.cache.num_blocks, MAX_KV_BYTES // page)
    todo = cases(config, max_blocks)
    if len(todo) < LEAST_KINDS:
        raise ConfigError(
            f"only {len(todo)} kinds of steps fit max_model_len = {config.scheduler.max_model_len}, max_num_seqs = "
            f"{config.scheduler.max_num_seqs} and {max_blocks} KV blocks, and a fit needs {LEAST_KINDS}: raise them"
        )
    executor = build_core(config, "local", clock).executor
    try:
        profiler = StepProfiler(executor, config, clock, sampling, max_blocks=max_blocks)
        _say(f"measuring {len(todo)} kinds of steps of {config.model.name} for {seconds:.0f} s …")
        try:
            spread = _rounds(profiler, todo, seconds, clock)
        except KeyboardInterrupt:
            measured = profiler.measured()
            if len(measured) < LEAST_KINDS:
                raise
            _say(f"stopped: fitting the {len(measured)} kinds of steps that were measured")
            return measured, profiler.measured_drafts(), None
        return profiler.measured(), profiler.measured_drafts(), spread
    finally:
        executor.close()


def _rounds(profiler: StepProfiler, todo: Sequence[Case], seconds: float, clock: Clock) -> Spread:
    """Visit every case of ``todo``, then all of them again and again until the time is over."""
    profiler.fill()
    end_s = clock.now() + seconds
    said_s = clock.now()
    # All cases, even beyond ``seconds``: a fit must not extrapolate.
    for i, case in enumerate(todo):
        profiler.visit(case, FIRST_REPEATS, limit_s=seconds * SHARE)
        if clock.now() - said_s >= EVERY_S:
            said_s = clock.now()
            _say(f"… {i + 1} of {len(todo)} kinds of steps")
    probed = anchors(todo)
    moments = [[profiler.probe(case) for case in probed]]
    begin_s, round_number = clock.now(), 0
    while clock.now() < end_s:
        round_number += 1
        for case in Random(round_number).sample(todo, len(todo)):
            profiler.visit(case, limit_s=seconds * SHARE)
            now_s = clock.now()
            if now_s - said_s >= EVERY_S:
                said_s = now_s
                _say(f"… round {round_number}, {max(0.0, end_s - now_s):.0f} s left")
            if len(moments) == 1 and now_s >= (begin_s + end_s) / 2:
                moments.append([profiler.probe(case) for case in probed])
            if now_s >= end_s:
                break
    moments.append([profiler.probe(case) for case in probed])
    return Spread.of(list(zip(*moments, strict=True)))


def _host(config: EngineConfig, model: CostModel, serve_flags: Sequence[str]) -> HostCost:
    _say("measuring the server around it …")
    return _serve(config, model, serve_flags)


def _ranked(
    config: EngineConfig, model: CostModel, links: Links, serve_flags: Sequence[str]
) -> dict[str, HostCost]:
    """Return the host's part with two ranks and with two stages, where each has as many cores as were measured."""
    threads = config.runner.num_threads
    hosts: dict[str, HostCost] = {}
    if 2 * threads > config.device.num_cores:
        return hosts
    layout = {"ep": 2} if cuts_rows("auto", config.model.spec) else {"tp": 2}
    for kind, flag, topology in (
        ("ranks", "--tensor-parallel-size", Topology(**layout)),
        ("stages", "--pipeline-parallel-size", Topology(pp=2)),
    ):
        _say(f"measuring a server with two {kind} …")
        steps = RankedSteps(model, config.model.spec, topology, links, config.model.dtype)
        hosts[kind] = _serve(config, steps, [*serve_flags, "--threads", str(threads), flag, "2"])
    return hosts


def _serve(config: EngineConfig, model: CostModel | RankedSteps, flags: Sequence[str]) -> HostCost:
    with LiveServer([config.model.name, "--port", "0", *flags]) as server:
        return measure_host(
            server.url,
            config.model.name,
            model,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=config.scheduler.max_model_len,
            vocab_size=config.model.spec.vocab_size,
        )


def _links() -> Links:
    _say("measuring the links between two ranks …")
    return measure_links()


def warnings_of(made: Profile) -> list[str]:
    """Return what a reader of the profile should know before trusting it."""
    warnings, error, spread = [], made.error, made.spread
    if spread is not None and spread.slow / spread.fast > CHANGED:
        warnings.append(
            f"the machine's speed changed while it was measured: the same steps took {spread.fast:.2f} … "
            f"{spread.slow:.2f} of their median. simulate prints the range; measure again on a quiet machine."
        )
    if error is not None and error.worst > 1.0:
        warnings.append(
            f"the worst step left out of the fit is {error.worst:.0%} off: near saturation, latencies of a "
            "simulation are off by more than that. Measure for longer (--seconds), on a quiet machine."
        )
    return warnings


def _warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        _say(
            f"warning: other programs use this machine (load {load:.1f} on {cores} cores): the times will be too long"
        )


def report(made: Profile) -> str:
    """Return the figures for a person."""
    m, host, error = made.executor, made.host, made.error
    rows = ", ".join(
        f"{k:.0f}: {(m.fixed_s + v) * 1e3:.2f}" for k, v in zip(m.rows.knots, m.rows.values, strict=True)
    )
    return (
        f"{made.model} on {made.machine['name']}, {made.settings['threads']} threads\n"
        f"{_error_line(error)}{_spread(made)}"
        f"rows     {rows} ms\n"
        f"logits   {m.logits.values[-1] * 1e3:.3f} ms at {m.logits.knots[-1]:.0f}; "
        f"per sequence {m.per_seq_s * 1e6:.1f} µs\n"
        f"KV       {m.per_decode_kv_s * 1e9:.2f} ns per key of a decode ({_with_spill(m):.2f} among many), "
        f"{m.per_chunk_kv_s * 1e9:.2f} of a chunk, {m.per_pair_s * 1e9:.3f} per pair\n"
        + _host_line("host    ", host)
        + (_drafts(made, made.draft) if made.draft else "")
        + "".join(_link(op, cost) for op, cost in (made.links or {}).items())
        + "".join(f"\n{_host_line(f'2 {kind:6}', cost)}" for kind, cost in made.ranked.items())
    )


def _error_line(error: FitError | None) -> str:
    if error is None:
        return ""
    return (
        f"error    median {error.median:.1%}, p90 {error.p90:.1%}, worst {error.worst:.1%}: steps left out of the fit, "
        f"of {error.num_points}\n"
    )


def _host_line(title: str, host: HostCost) -> str:
    return (
        f"{title} {host.fixed_s * 1e3:.2f} ms per step, {host.per_seq_s * 1e6:.0f} µs per sequence, "
        f"{host.per_row_s * 1e6:.2f} µs per row, "
        f"{host.request_s * 1e3:.2f} ms per request, {host.per_prompt_token_s * 1e6:.2f} µs per prompt token"
    )


def _link(op: str, cost: LinkCost) -> str:
    size, seconds = cost.points[-1]
    return (
        f"\nlink     {op}: {cost.alpha_s * 1e6:.1f} µs + {cost.beta_s * 1e9:.3f} ns per byte; {seconds * 1e6:.0f} µs "
        f"for {size / 1024:.0f} KiB"
    )


def _drafts(made: Profile, draft: DraftCost) -> str:
    """Say what drafts cost, and how well the model predicts the steps that verify some."""
    steps = [p for p in made.points if p.step.num_logits > p.step.num_seqs]
    errors = [abs(made.executor.seconds(p.step) / p.seconds - 1.0) for p in steps]
    verified = f"; {len(steps)} steps that verify some: median error {median(errors):.1%}" if errors else ""
    return (
        f"\ndrafts   {draft.per_forward_s * 1e3:.3f} ms per forward pass, {draft.per_draft_s * 1e6:.1f} µs per draft, "
        f"{draft.per_missed_s * 1e6:.2f} µs per token missed{verified}"
    )


def _spread(made: Profile) -> str:
    if made.spread is None:
        return ""
    return f"spread   {made.spread.fast:.2f} … {made.spread.slow:.2f} of the median, over the measurement\n"


def _with_spill(m: CostModel) -> float:
    """Return the ns per key of a decode at the largest number of keys that was measured."""
    most = m.spill.knots[-1]
    return (m.per_decode_kv_s + m.spill.at(most) / most) * 1e9


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
