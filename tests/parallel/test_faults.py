"""A rank that is killed or stopped under streams: the server goes on, and no token differs."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tests.engine.test_process import gone, wait_for
from tests.exact.models import MODELS
from tests.exact.suite import Case
from tests.parallel.serving import QUILL, config_of
from tests.parity.families import save

from quire.args import EngineArgs, executor_of
from quire.clock import WallClock
from quire.config import DeviceInfo
from quire.device import detect_device
from quire.engine.assemble import configure, load_text
from quire.engine.frontend import Frontend
from quire.engine.output import OutputChunk
from quire.engine.process import ProcessClient
from quire.engine.supervisor import RestartPolicy, Supervisor
from quire.errors import ConfigError, ModelLoadError
from quire.executor import rank_processes
from quire.executor.ranks import RanksExecutor
from quire.models.checkpoint import describe
from quire.parallel.segment import slot_bytes_of
from quire.parallel.topology import Topology
from quire.request import SamplingParams
from quire.resolve import resolve

NUM_STREAMS = 32
SIZES: tuple[dict[str, int], ...] = (
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"context_parallel_size": 2},
    {
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "num_redundant_experts": 2,
        "eplb_step_interval": 5,
    },
)


def save_mixtral(folder: Path) -> str:
    """Write a model with experts that knows Quill's ids; return its folder."""
    config = transformers.MixtralConfig(
        vocab_size=describe(Path(QUILL)).spec.vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, max_position_embeddings=512,
        dtype="bfloat16",
    )  # fmt: skip
    save(transformers.MixtralForCausalLM(config).to(torch.bfloat16), folder)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("sizes", SIZES, ids=["tp", "pp", "cp", "ep"])
def test_streams_go_on_after_the_death_of_a_rank(
    sizes: dict[str, int], fault: signal.Signals, tmp_path: Path
) -> None:
    if "enable_eplb" in sizes:
        sizes = {**sizes, "model": save_mixtral(tmp_path), "tokenizer": QUILL}  # type: ignore[dict-item]
    args = EngineArgs(num_kv_blocks=2048, max_model_len=512, threads=1, **sizes)  # type: ignore[arg-type]
    config, checkpoint = configure(args, detect_device())
    text = load_text(args, config, checkpoint)
    params = [
        SamplingParams(max_tokens=200, ignore_eos=True, seed=i, temperature=0.9) for i in range(NUM_STREAMS)
    ]

    async def main() -> None:
        started: list[ProcessClient] = []

        def start() -> ProcessClient:
            started.append(ProcessClient(config, executor=executor_of(args)))
            return started[-1]

        policy = RestartPolicy(backoff_s=0.0, hang_timeout_s=2.0)
        supervisor = Supervisor(start(), start, WallClock(), policy)
        frontend = Frontend(supervisor, text.tokenizer, text.chat_template, text.model, WallClock())
        await frontend.start()

        async def ask(index: int) -> tuple[OutputChunk, ...]:
            return await (await frontend.submit(f"Story {index}: once", params[index])).collect()

        async def disturb() -> list[int]:
            while supervisor.stats().num_generated_tokens < 20:
                await asyncio.sleep(0.02)
            ranks = _children(started[0].pid)
            assert len(ranks) == 2
            os.kill(ranks[0], fault)
            start_s = time.monotonic()
            while supervisor.num_restarts == 0 or supervisor.health().status != "ready":
                await asyncio.sleep(0.02)
            print(f"{sizes} {fault.name}: ready again after {time.monotonic() - start_s:.1f} s")
            return ranks

        disturbing = asyncio.ensure_future(disturb())
        disturbed = await asyncio.gather(*[ask(i) for i in range(NUM_STREAMS)])
        ranks = await disturbing
        assert supervisor.num_restarts == 1
        assert disturbed == await asyncio.gather(*[ask(i) for i in range(NUM_STREAMS)])
        ranks += _children(started[1].pid)
        await frontend.close()
        wait_for(lambda: all(map(gone, ranks)))
        for client in started:
            assert not list(Path("/dev/shm").glob(f"quire-{client.pid}-*"))

    asyncio.run(main())


def _children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _children(pid: int) -> list[int]:
    """Return the ranks of an engine, by number."""
    ids = _children_of(pid)
    names = {each: Path(f"/proc/{each}/cmdline").read_bytes().rstrip(b"\0") for each in ids}
    return sorted(
        (each for each in ids if names[each].startswith(b"quire: rank")), key=lambda each: names[each]
    )


def test_a_rank_out_of_memory_at_load_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank may map 4 GiB, and its half of the embedding alone has more."""
    start, pids = rank_processes.start_process, []

    def limited(number: int, memory: str, sockets: Sequence[socket.socket | None]) -> subprocess.Popen[bytes]:
        process = start(number, memory, sockets)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (4 << 30, 4 << 30))
        pids.append(process.pid)
        return process

    monkeypatch.setattr(rank_processes, "start_process", limited)
    config = config_of(Case("llama", "bfloat16", 31), Topology(tp=2))
    spec = replace(config.model.spec, vocab_size=6 * 2**30 // config.model.spec.hidden_size)
    with pytest.raises(
        ModelLoadError, match=r"Rank \d \(process \d+\): it ran out of memory on .* GiB"
    ) as raised:
        RanksExecutor(replace(config, model=replace(config.model, spec=spec)))
    assert "\n" not in str(raised.value)
    wait_for(lambda: all(map(gone, pids)))
    assert not list(Path("/dev/shm").glob(f"quire-{os.getpid()}-*"))


@pytest.mark.slow
def test_an_engine_killed_while_it_loads_leaves_nothing() -> None:
    """Its ranks remove the memory when they see that it has gone."""
    script = "from quire import LLM; LLM('quill', tensor_parallel_size=2, threads=1, num_kv_blocks=64)"
    with subprocess.Popen([sys.executable, "-c", script]) as engine:
        pattern = f"quire-{engine.pid}-*"
        wait_for(lambda: list(Path("/dev/shm").glob(pattern)), seconds=120.0)
        wait_for(lambda: len(_children_of(engine.pid)) == 2)
        ranks = _children_of(engine.pid)
        engine.kill()
    wait_for(lambda: all(map(gone, ranks)), seconds=120.0)
    assert not list(Path("/dev/shm").glob(pattern))


def test_too_small_dev_shm_starts_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(rank_processes, "start_process", None)
    with pytest.raises(ConfigError, match=r"/dev/shm has too little room: .* needs 4 MiB .*--shm-size"):
        RanksExecutor(config_of(Case("llama", "bfloat16", 31), Topology(tp=2)))
    assert not list(Path("/dev/shm").glob(f"quire-{os.getpid()}-*"))


@pytest.mark.parametrize(("cp", "mib"), [(2, 1), (3, 1), (4, 2), (8, 3)])
def test_slots_have_room_for_latents_of_128_heads(cp: int, mib: int) -> None:
    """DeepSeek-V3's: ``cp · 128 · (512 + 2)`` numbers of fp32 per row, in whole MiB."""
    spec = MODELS["latent"]()
    layers = tuple(
        replace(layer, attn=replace(layer.attention, num_heads=128, num_kv_heads=1, kv_lora_rank=512))
        for layer in spec.layers
    )
    assert slot_bytes_of(replace(spec, layers=layers), Topology(cp=cp)) == mib << 20


MACHINE = DeviceInfo("cpu", "test", 2, 2**33, 2**33)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 makes 3 ranks, and there are 2 cores"),
        ({"tensor_parallel_size": "two"}, "tensor_parallel_size = 'two' must be 'auto' or a number"),
        (
            {"pipeline_parallel_size": 99, "threads": 1},
            r"pipeline_parallel_size = 99: the model has \d+ layers",
        ),
        ({"tensor_parallel_size": 2, "executor": "local"}, "executor = 'local' is one process"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "enable_expert_parallel: the model has no experts",
        ),
        (
            {"tensor_parallel_size": 64, "threads": 1, "tensor_parallel_layout": "sums"},
            "tensor_parallel_size = 64: .* heads",
        ),
        ({"context_parallel_size": 3}, "context_parallel_size 3 makes 3 ranks, and there are 2 cores"),
        ({"context_parallel_size": 0}, "context_parallel_size = 0: it must be an integer of at least 1"),
        (
            {"context_parallel_size": 2, "max_model_len": 512, "num_kv_blocks": 8, "threads": 1},
            "max_model_len = 512 needs 17 KV blocks of 32 tokens, and there is room for 8",
        ),
        ({"enable_eplb": True}, "enable_eplb and num_redundant_experts need enable_expert_parallel"),
        (
            {"pipeline_parallel_size": 2, "executor": "ray", "nodes": 3},
            "nodes = 3: 2 stages do not divide over",
        ),
        ({"nodes": 2}, "nodes and ray_address need executor = 'ray'"),
        ({"tensor_parallel_size": 64, "threads": 1}, "tensor_parallel_size = 64: .* heads"),
    ],
)
def test_what_cannot_run_is_refused_with_the_numbers(settings: dict[str, object], message: str) -> None:
    args = EngineArgs(**settings)  # type: ignore[arg-type]
    _, checkpoint = configure(EngineArgs(), detect_device())
    with pytest.raises(ConfigError, match=message):
        resolve(args, checkpoint.spec, MACHINE)
