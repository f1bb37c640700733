"""The invariant mode of a GPU at a model's real size: tokens alone, together, in chunks, cached, and overlapped or not.

On a GPU Qwen3-0.6B's architecture with random weights; in Triton's interpreter a toy, so that the test itself is run.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch
from benchmarks.gpu.models import SPECS, configuration
from tests.kernels.triton.device import DEVICE, WARNINGS

from quire.clock import WallClock
from quire.engine.core import EngineCore
from quire.executor.device import DeviceExecutor
from quire.kernels import triton_overlap
from quire.request import Request, SamplingParams, TokenEvent
from quire.scheduler.scheduler import Scheduler

ON_GPU = DEVICE.type == "cuda"
pytestmark = [WARNINGS, pytest.mark.gpu if ON_GPU else pytest.mark.triton_interpret]
MODEL, COUNT, LONGEST, OUTPUT, CHUNK = ("qwen3-0.6b", 24, 1500, 24, 777) if ON_GPU else ("tiny", 3, 20, 3, 16)
SEED = 20261126


def tokens_of(
    prompts: list[tuple[int, ...]], *, together: int, chunk: int, quantize: str | None
) -> list[list[int]]:
    """Every second request is sampled. The prefix cache is on where several run: a prompt begins as another one."""
    config = configuration(
        MODEL, batch_invariant=True, max_num_batched_tokens=chunk, enable_prefix_caching=together > 1,
        quantize=quantize,
    )  # fmt: skip
    assert config.determinism == "exact"
    executor = DeviceExecutor(config)
    core = EngineCore(Scheduler(config.scheduler, config.cache), executor, WallClock())
    tokens: list[list[int]] = [[] for _ in prompts]
    waiting, running = list(range(len(prompts))), 0
    while waiting or running:
        while waiting and running < together:
            i = waiting.pop(0)
            sampling = SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=OUTPUT, ignore_eos=True)
            core.put(Request(str(i), prompts[i], sampling, core.clock.now()))
            running += 1
        for event in core.step():
            assert isinstance(event, TokenEvent)
            assert event.error is None, event.error
            tokens[int(event.request_id)].extend(event.token_ids)
            running -= event.finish_reason is not None
    executor.close()
    del core, executor
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int4-g128" if ON_GPU else "int8"])
def test_tokens_do_not_depend_on_the_batch(quantize: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(SEED)
    vocab = SPECS[MODEL].vocab_size
    prompts = [tuple(rng.randrange(vocab) for _ in range(rng.randrange(5, LONGEST))) for _ in range(COUNT)]
    prompts[-1] = prompts[0] + prompts[-1][:5]
    overlaps = triton_overlap.overlaps()
    monkeypatch.setattr(triton_overlap, "overlaps", lambda: False)
    alone = tokens_of(prompts, together=1, chunk=8192, quantize=quantize)
    monkeypatch.setattr(triton_overlap, "overlaps", lambda: overlaps)
    for chunk in (8192, CHUNK):
        assert tokens_of(prompts, together=COUNT, chunk=chunk, quantize=quantize) == alone, f"seed {SEED}"
