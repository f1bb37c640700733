"""Chooses an executor and builds the core around it; torch is imported here and not earlier. Executors:

"local"    the model, in this process, on the device of the configuration
"ranks"    the model cut over processes of this machine, as the configuration's topology says
"ray"      the same, over the machines of a Ray cluster
"timed"    no model, no KV cache: steps sleep as long as a cost model says ("timed@FILE", from `CostModel.to_json`)
"M:F"      the result of the function F of the module M for (config, argument), "M:F@argument"
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cache.events import EventBuffer
from quire.clock import Clock
from quire.config import EngineConfig, SloConfig
from quire.engine.client import EngineInfo
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.executor.base import Executor, RankLoaded
from quire.metrics.engine_stats import RankStats
from quire.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.executor.profile_control import Profiles


def preload(executor: str) -> None:
    """Import what ``executor`` needs. A child process does so while its configuration is still being resolved."""
    importlib.import_module(_module(executor))


def build_core(config: EngineConfig, executor: str, clock: Clock) -> EngineCore:
    """Load the model and return the core around it.

    Raises:
        ModelLoadError, ConfigError: the checkpoint or the settings are wrong; one line.
    """
    chosen = make_executor(config, executor, clock)
    ranks: tuple[RankLoaded, ...] = tuple(getattr(chosen, "loaded", ()))
    rank_stats: Callable[[], RankStats] | None = getattr(chosen, "rank_stats", None)
    profiler = _profiler(chosen, config, clock)
    recorder, mover = None, None
    if config.cache.tiers:
        from quire.engine import kv_tier

        chosen, mover = kv_tier.connected(chosen, config, clock)
    sentence = config.model.spec.sentence
    if sentence is not None and sentence.labels and config.model.spec.encoder is None:
        from quire.executor.classifier import ClassifyingExecutor

        chosen = ClassifyingExecutor(chosen, config.model)
    if config.recorder is not None:
        from quire.executor.recorder import Recorder, RecordingExecutor

        recorder = Recorder(config.recorder.num_steps)
        chosen = RecordingExecutor(chosen, recorder, clock)
    if config.runner.step_log is not None:
        from quire.executor.logged import LoggedExecutor

        chosen = LoggedExecutor(
            chosen, Path(config.runner.step_log), clock, config.scheduler.max_num_batched_tokens
        )
    events = EventBuffer(with_tokens=False) if config.cache.has_events else None
    rows, num_stages = None, config.topology.pp
    if num_stages > 1:
        from quire.scheduler.policies.stages import stage_rows

        rows = stage_rows(config.model.spec.num_active_params, num_stages, config.runner.kernels)
    scheduler = Scheduler(
        config.scheduler, config.cache, events, chains_steps=chosen.chains_steps, num_stages=num_stages,
        stage_rows=rows,
    )  # fmt: skip
    core = EngineCore(scheduler, chosen, clock)
    if mover is not None:
        kv_tier.decide(core, mover)
    if config.slo is not None:
        _hold_slo(core, config.slo)
    core.recorder, core.profiler = recorder, profiler
    core.ranks = ranks
    if rank_stats is not None:
        core.completed = lambda stats: replace(stats, ranks=rank_stats())
    return core


def _hold_slo(core: EngineCore, slo: SloConfig) -> None:
    """Let the scheduler predict by a model of step times, and hold the targets that there are."""
    from quire.cost.cost_model import CostModel
    from quire.scheduler.policies.slo import SloController

    core.scheduler.use_step_time(CostModel.from_json(json.loads(slo.cost_model)))
    if slo.tpot_s is not None:
        core.controller = SloController(core.scheduler.predictor, core.scheduler.config, slo.tpot_s)


def _profiler(executor: Executor, config: EngineConfig, clock: Clock) -> Profiles | None:
    """Return what profiles the executor, started where the settings say so; None: profiles have no folder."""
    if config.runner.profile_dir is None:
        return None
    from quire.executor.local import LocalExecutor
    from quire.executor.profiled import Profiler

    if not isinstance(executor, LocalExecutor):
        raise ConfigError("--profile-dir is for an engine on a CPU, in one process.", param="profile_dir")
    profiler = Profiler(executor, config, clock)
    if config.runner.profile_steps is not None:
        profiler.start(config.runner.profile_steps)
    return profiler


def describe(
    config: EngineConfig, executor: str, load_s: float, ranks: Sequence[RankLoaded] = ()
) -> EngineInfo:
    """Return what an engine of ``config`` reports. Call it after `build_core`, which registers the kernels."""
    blocks = config.cache.num_blocks
    block_bytes = config.kv_layout.block_bytes(config.cache.block_size, config.model.kv_dtype)
    weight_bytes = config.model.spec.weight_bytes(config.model.dtype, config.model.formats)
    if config.speculate is not None:
        from quire.cost.speculation import draft_bytes

        drafts, of_block = draft_bytes(
            config.speculate.draft or config.speculate.heads, config.cache.block_size
        )
        weight_bytes, block_bytes = weight_bytes + drafts, block_bytes + of_block
    full = sum(window is None for window in config.cache.windows) or len(config.cache.windows)
    return EngineInfo(
        num_kv_tokens=blocks * config.cache.block_size // full,
        kv_bytes=blocks * block_bytes,
        weight_bytes=weight_bytes,
        kernels=_kernels(config, executor, ranks),
        determinism=config.determinism,
        load_s=load_s,
        pid=os.getpid(),
    )


def _module(executor: str) -> str:
    module, colon, _ = executor.partition("@")[0].partition(":")
    return module if colon else f"quire.executor.{module}"


def make_executor(
    config: EngineConfig, executor: str, clock: Clock, weights: Iterable[tuple[str, Any]] | None = None
) -> Executor:
    """Load the model. ``weights``, for "local", replace the checkpoint's. Raises as `build_core`."""
    kind, _, argument = executor.partition("@")
    if kind == "local" and config.model.spec.encoder is not None:
        from quire.executor.encoder import EncoderExecutor

        return EncoderExecutor(config, weights=weights)
    if kind == "local" and config.device.kind != "cpu":
        from quire.executor.device import DeviceExecutor

        return DeviceExecutor(config, clock=clock, weights=weights)
    if kind == "local":
        from quire.executor.local import LocalExecutor

        return LocalExecutor(config, clock=clock, weights=weights)
    if kind == "ranks":
        from quire.executor.ranks import RanksExecutor

        return RanksExecutor(config, clock)
    if kind == "ray":
        from quire.executor.ranks import RanksExecutor
        from quire.executor.ray import start_on_ray

        return RanksExecutor(config, clock, start_on_ray)
    if kind == "timed":
        from quire.cost.cost_model import CostModel
        from quire.executor.timed import TimedExecutor

        step_time = CostModel.from_json(json.loads(Path(argument).read_text()))
        return TimedExecutor(lambda taken: step_time.seconds(taken.step), clock)
    factory = kind.partition(":")[2]
    made: Executor = getattr(importlib.import_module(_module(executor)), factory)(config, argument)
    return made


def _kernels(config: EngineConfig, executor: str, ranks: Sequence[RankLoaded]) -> str:
    if ranks:
        slow = sum(bool(loaded.call_by_call) for loaded in ranks)
        steps = f", {slow} of them call by call" if slow and config.runner.backend == "native" else ""
        return f"{len(ranks)} rank{'s' * (len(ranks) > 1)}: {ranks[0].kernels}{steps}"
    if not executor.startswith("local"):
        return executor
    from quire.kernels.registry import in_words

    return in_words(config.runner)
