"""Replayed steps equal plain ones bit for bit, and a model that is not native throughout is not recorded."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tests.exact.suite import at_level
from tests.kernels.checks import assert_same_bits, runner_config
from tests.runner.tiny import SPECS, Driver, engine_config, prompt_of

from quire.config import EngineConfig
from quire.kernels.registry import backends
from quire.kernels.tape import NotRecordable, StepTape
from quire.kernels.workspace import Arena, empty
from quire.layers.moe import MoeBlock
from quire.weight_format import WeightFormat

native = pytest.importorskip("quire._native", reason="the native extension is not built")
LEVELS = [level for level in backends("linear") if level != "reference"]
DTYPES = ("float32", "bfloat16")


def config_of(spec: str, dtype: str, level: str) -> EngineConfig:
    config = engine_config(SPECS[spec], dtype)
    runner = runner_config(level, num_threads=2)
    return replace(config, runner=runner, scheduler=replace(config.scheduler, max_num_batched_tokens=80))


def play(driver: Driver) -> Driver:
    """Chunks, single rows and both together; a step without logits; one larger than the recorded step."""
    for seq_id, length in ((1, 33), (2, 7), (3, 100)):
        driver.add(seq_id, prompt_of(length, seq_id))
    driver.step((1, 33), (2, 6))
    driver.step((3, 40))
    driver.step((1, 1), (2, 1), (3, 60))
    for _ in range(20):
        driver.step((3, 1), (1, 1), (2, 1))
    driver.drop(2)
    driver.step((1, 1), (3, 1))
    driver.add(4, prompt_of(90, 4))
    driver.step((4, 90), (1, 1))
    driver.step((4, 1))
    return driver


def in_formats(config: EngineConfig) -> EngineConfig:
    """q, k, v and gate, up of the first layer each in formats of their own, as Q4_K_M of GGUF has them."""
    formats = {
        "layers.0.attn.q.weight": WeightFormat("int4", 32),
        "layers.0.attn.k.weight": WeightFormat("int4", 64),
        "layers.0.mlp.gate.weight": WeightFormat("int8", 16),
        "layers.0.mlp.up.weight": WeightFormat("int8"),
    }
    return replace(config, model=replace(config.model, formats=formats))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [*map(at_level, LEVELS)])
@pytest.mark.parametrize("spec", ["llama", "windows", "mixture", "latent", "formats"])
def test_replays_equal_plain_steps(spec: str, level: str, dtype: str) -> None:
    config = (
        in_formats(config_of("llama", dtype, level)) if spec == "formats" else config_of(spec, dtype, level)
    )
    taped, plain = Driver(config), Driver(config)
    assert taped.executor.worker.runner.tape is not None
    plain.executor.worker.runner.tape = None
    play(taped)
    play(plain)
    assert taped.logits.keys() == plain.logits.keys()
    for key, row in plain.logits.items():
        assert_same_bits(taped.logits[key], row, f"{spec} {level} {dtype} (sequence, position) {key}")
    assert {i: s.output for i, s in taped.seqs.items()} == {i: s.output for i, s in plain.seqs.items()}


def test_what_computes_in_torch_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MoeBlock, "__call__", lambda self, x, *_: x + 1.0)
    with caplog.at_level(logging.INFO):
        driver = Driver(config_of("mixture", "float32", LEVELS[0]))
    assert driver.executor.worker.runner.tape is None
    assert "steps run call by call: torch's aten" in caplog.text
    driver.add(1, prompt_of(20))
    assert driver.generate(1, 3)


def test_a_failed_step_leaves_the_tape_whole() -> None:
    lone, driver = (Driver(config_of("llama", "float32", LEVELS[0])) for _ in range(2))
    for d in (lone, driver):
        d.add(1, prompt_of(20))
        d.step((1, 20))
    driver.add(2, prompt_of(5))
    driver.seqs[2].epoch = 7  # a plan for an epoch that the worker does not know
    assert "epoch" in (driver.try_step((1, 1), (2, 5)).error or "")
    driver.drop(2)
    driver.drop(1)  # it was in the step that failed: the scheduler ends it, or admits it anew
    driver.add(1, prompt_of(20), epoch=1)
    assert lone.generate(1, 6) == driver.generate(1, 6)


def test_torch_in_the_middle_is_named() -> None:
    x = torch.randn(4, 8)
    for forward in (lambda: x + 1, lambda: x.index_select(0, torch.arange(2)), lambda: x.t().contiguous()):
        with pytest.raises(NotRecordable, match="aten"):
            StepTape(forward, 4, 2)
    with pytest.raises(NotRecordable, match="aten"):
        StepTape(lambda: x[:2].mul_(2.0), 4, 2)
    assert StepTape(lambda: x[:2].unflatten(1, (2, 4)).transpose(0, 1), 4, 2).output.shape == (2, 2, 4)


def test_the_arena_gives_again_what_is_let_go() -> None:
    arena = Arena()
    first = arena.empty((100, 3), torch.float32)
    view = first[10:]
    address = first.data_ptr()
    del first
    second = arena.empty((100, 3), torch.float32)
    assert second.data_ptr() >= address + 1200, "memory that a view still has was given again"
    view.fill_(1.0)
    second.fill_(2.0)
    assert bool((view == 1.0).all())
    del view
    assert arena.empty((5,), torch.bfloat16).data_ptr() == address
    assert arena.num_bytes == 1 << 20
    large = arena.empty((1 << 19,), torch.float32)
    assert arena.num_bytes == 3 << 20
    assert not bool(large.any())
    assert empty(2, 2, dtype=torch.float32).shape == (2, 2)


def test_a_start_does_not_import_the_compiler() -> None:
    """torch._dynamo and sympy cost a second and 60 MB; torch's own defaults would have them imported by a recording."""
    script = (
        "import sys\n"
        "from quire import LLM, SamplingParams\n"
        "with LLM('quill', kv_memory='64MiB') as llm:\n"
        "    llm.generate('The', SamplingParams(max_tokens=2))\n"
        "assert 'torch' in sys.modules\n"
        "print(sorted(name for name in sys.modules if name in ('torch._dynamo', 'sympy')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
