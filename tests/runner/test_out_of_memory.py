"""A step that finds too little memory: halves, fewer rows in the steps after it, and nobody is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.fakes.integrity import check_integrity
from tests.runner.tiny import GREEDY, SPECS, engine_config, llama, weights

from quire.clock import VirtualClock
from quire.config import DeviceInfo, EngineConfig
from quire.engine.core import EngineCore
from quire.executor.local import LocalExecutor
from quire.request import FinishReason, Request, TokenEvent
from quire.runner.model_runner import ModelRunner
from quire.scheduler.scheduler import Scheduler

LENGTHS = (60, 40, 5, 33, 90, 7)


def serve(
    config: EngineConfig, executor: type, lengths: tuple[int, ...] = LENGTHS
) -> tuple[dict[str, TokenEvent], Scheduler]:
    """Run one request of each length together; return their last events, with all of their tokens."""
    scheduler = Scheduler(config.scheduler, config.cache)
    run = executor(config, clock=VirtualClock(), weights=weights(config.model.spec))
    core = EngineCore(scheduler, run, VirtualClock())
    for length in lengths:
        prompt = tuple(range(length, 0, -1))
        core.put(Request(str(length), prompt, replace(GREEDY, max_tokens=6), 0.0))
    tokens: dict[str, tuple[int, ...]] = {str(length): () for length in lengths}
    ends: dict[str, TokenEvent] = {}
    while core.has_work:
        for event in core.step():
            tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                ends[event.request_id] = event._replace(token_ids=tokens[event.request_id])
        check_integrity(scheduler)
    assert core.stats().num_free_blocks + core.stats().num_idle_blocks == core.stats().num_blocks
    return ends, scheduler


def limit(monkeypatch: pytest.MonkeyPatch, runner: type, most: int) -> list[int]:
    """Let steps of more than ``most`` rows find no memory; return the rows of those that did."""
    real: Callable[..., object] = runner.launch  # type: ignore[attr-defined]
    failures: list[int] = []

    def launch(self, step):  # type: ignore[no-untyped-def]
        if step.num_tokens > most:
            failures.append(step.num_tokens)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return real(self, step)

    monkeypatch.setattr(runner, "launch", launch)
    return failures


@pytest.mark.parametrize("name", ["llama", "windows"])
def test_all_requests_finish_with_their_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are preempted since not even their own rows fit, and whoever reads their blocks."""
    config = engine_config(SPECS[name])
    expected, _ = serve(config, LocalExecutor)
    failures = limit(monkeypatch, ModelRunner, 35)
    ends, scheduler = serve(config, LocalExecutor)
    assert {key: end.token_ids for key, end in ends.items()} == {
        k: end.token_ids for k, end in expected.items()
    }
    assert all(end.finish_reason is FinishReason.LENGTH for end in ends.values())
    assert scheduler.stats().num_preemptions > 0
    assert 16 <= scheduler.config.max_num_batched_tokens <= 35
    seen = len(failures)
    serve(replace(config, scheduler=scheduler.config), LocalExecutor)
    assert len(failures) == seen, "steps of the size that was found fit"


def test_a_sequence_that_never_fits_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, ModelRunner, 10)
    ends, _ = serve(engine_config(SPECS["llama"]), LocalExecutor, (40, 5))
    assert ends["5"].finish_reason is FinishReason.LENGTH
    assert ends["40"].finish_reason is FinishReason.ERROR
    assert "too little memory for its 15 rows" in str(ends["40"].error)


@pytest.mark.slow
@pytest.mark.triton_interpret
def test_on_a_device_with_two_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kernels.triton.device import DEVICE

    from quire.executor.device import DeviceExecutor
    from quire.runner.device_runner import DeviceRunner

    config = engine_config(llama(1), isa="triton")
    kind = "cuda" if DEVICE.type == "cuda" else "interpret"
    config = replace(config, device=DeviceInfo(kind, "test", 2, 1 << 34, 1 << 33, capability=(9, 0)))  # type: ignore[arg-type]
    lengths = (40, 5, 33)
    expected, _ = serve(config, DeviceExecutor, lengths)
    assert limit(monkeypatch, DeviceRunner, 25) == []
    ends, scheduler = serve(config, DeviceExecutor, lengths)
    assert {key: end.token_ids for key, end in ends.items()} == {
        k: end.token_ids for k, end in expected.items()
    }
    assert scheduler.stats().num_preemptions > 0
