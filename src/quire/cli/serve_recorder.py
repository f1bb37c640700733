"""`quire serve` with the flight recorder, ``--record-requests`` and ``--compare-to``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.args import EngineArgs, ServerArgs
from quire.clock import WallClock
from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.process import ProcessClient
from quire.engine.recording_file import about, recorder_config
from quire.engine.request_log import RequestLog, keep_requests
from quire.engine.supervisor import RestartPolicy, Supervisor
from quire.models.checkpoint import Checkpoint
from quire.models.fingerprint import fingerprint

if TYPE_CHECKING:
    from quire.engine.guard import GoldenPrompt


def with_recorder(
    config: EngineConfig, checkpoint: Checkpoint, engine_args: EngineArgs, args: ServerArgs
) -> EngineConfig:
    """Return ``config`` with the flight recorder that the settings ask for."""
    recorder = recorder_config(
        args.record_dir,
        args.record_steps,
        with_ids=args.record_ids,
        args=engine_args,
        config=config,
        fingerprint=fingerprint(checkpoint),
    )
    return replace(config, recorder=recorder)


def supervised(
    first: ProcessClient,
    restart: Callable[[], ProcessClient],
    config: EngineConfig,
    args: ServerArgs,
    golden: GoldenPrompt | None,
) -> EngineClient:
    """Return the client of an engine that is replaced when it dies; what was in flight then is saved.

    Raises:
        ConfigError: the file of ``--record-requests`` cannot be written.
    """
    clock = WallClock()
    policy = RestartPolicy(
        max_restarts=args.max_restarts,
        hang_timeout_s=args.hang_timeout_s,
        watches_hangs=args.hang_timeout_s > 0,
    )
    supervisor = Supervisor(first, restart, clock, policy, golden)
    if config.recorder is not None and config.recorder.with_ids:
        folder = Path(config.recorder.folder)
        supervisor.on_death = partial(keep_requests, folder, about=about(config))
    if args.record_requests is None:
        return supervisor
    return RequestLog(supervisor, Path(args.record_requests), about(config), clock)
