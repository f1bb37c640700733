"""Ranks on a real Ray cluster of two nodes, both on this machine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.test_process import gone, wait_for
from tests.exact.models import MODELS
from tests.exact.suite import Case
from tests.gateway.services import free_port
from tests.lora.peft_files import make_adapters
from tests.parallel.serving import CASE, FCFS, alone_on, config_of, serve
from tests.parallel.test_faults import save_mixtral

from quire import SamplingParams, __version__
from quire.args import EngineArgs, executor_of
from quire.clock import WallClock
from quire.config import EngineConfig, RayConfig
from quire.device import detect_device
from quire.engine.assemble import configure, load_text
from quire.engine.frontend import Frontend
from quire.engine.output import OutputChunk
from quire.engine.process import ProcessClient
from quire.engine.supervisor import RestartPolicy, Supervisor
from quire.errors import ConfigError, EngineDeadError
from quire.executor import ray as ray_executor
from quire.executor.ranks import RanksExecutor
from quire.executor.ray import start_on_ray
from quire.kernels.registry import NATIVE_LEVELS, backends
from quire.parallel.topology import Topology
from quire.step import StepPlan

TWO = Topology(pp=2)
LEVEL = next((level for level in NATIVE_LEVELS[::-1] if level in backends("linear")), "reference")
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="the extra Ray is not installed"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Start a head and a second node, of two cores each; end them by their process ids."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "HOME": folder,
        }.items():
            patch.setenv(name, value)
        port = free_port()
        head = ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", folder]
        address = f"127.0.0.1:{port}"
        nodes = []
        for arguments in (head, ["--address", address]):
            nodes.append(_start_node(arguments))
            _wait_for_nodes(address, len(nodes))
        try:
            yield address
        finally:
            import ray

            ray.shutdown()
            for node in nodes:
                _end(node)


def _start_node(arguments: list[str]) -> subprocess.Popen[bytes]:
    common = ["--num-cpus", "2", "--object-store-memory", "80000000", "--disable-usage-stats", "--block"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *arguments, *common]
    return subprocess.Popen(command, start_new_session=True)


def _end(node: subprocess.Popen[bytes]) -> None:
    for pid in (node.pid, *_descendants(node.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait(30)


def _num_nodes() -> int:
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def _descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, whichever of their parents' threads started them."""
    below = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            below[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += below[each]
    return found[1:]


def _wait_for_nodes(address: str, count: int) -> None:
    import ray

    def are_there() -> bool:
        try:
            if not ray.is_initialized():
                ray.init(address=address, configure_logging=False, log_to_driver=False)
            return _num_nodes() == count
        except ConnectionError:
            return False

    wait_for(are_there, seconds=120.0)


@pytest.mark.slow
@needs_ray
def test_two_stages_on_two_nodes_give_the_tokens_of_one_process(cluster: str) -> None:
    config = replace(config_of(CASE, TWO), ray=RayConfig(cluster, 2))
    executor = RanksExecutor(config, start=start_on_ray)
    pids = executor.pids
    try:
        serve(CASE, executor, config, FCFS)
    finally:
        executor.close()
    wait_for(lambda: all(map(gone, pids)))


@pytest.mark.slow
@needs_ray
def test_tensor_ranks_on_a_node_give_the_tokens_of_ranks_here(cluster: str) -> None:
    config, before = config_of(CASE, Topology(tp=2)), _memory_of_the_dead()
    here = RanksExecutor(config)
    try:
        truth = alone_on(CASE, here, config)
    finally:
        here.close()
    for nodes, topology in ((1, Topology(tp=2)), (2, Topology(tp=2, pp=2)), (2, Topology(tp=2))):
        config = replace(config_of(CASE, topology), ray=RayConfig(cluster, nodes))
        executor = RanksExecutor(config, start=start_on_ray)
        pids = executor.pids
        try:
            serve(CASE, executor, config, FCFS, truth)
        finally:
            executor.close()
        wait_for(lambda pids=pids: all(map(gone, pids)))  # type: ignore[misc]
        assert not _memory_of_the_dead() - before


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize(("nodes", "topology"), [(1, Topology(cp=2)), (2, Topology(ep=2))], ids=str)
def test_context_and_expert_ranks_over_ray_have_the_bits_of_ranks_here(
    cluster: str, nodes: int, topology: Topology, tmp_path: Path
) -> None:
    """On one node they exchange in shared memory, on two over Gloo."""
    case = replace(CASE, num_requests=6)
    if topology.ep > 1:
        case = replace(case, model=save_mixtral(tmp_path))
    config = config_of(case, topology)
    here = RanksExecutor(config)
    try:
        truth = alone_on(case, here, config)
    finally:
        here.close()
    executor = RanksExecutor(replace(config, ray=RayConfig(cluster, nodes)), start=start_on_ray)
    pids = executor.pids
    try:
        serve(case, executor, config, FCFS, truth)
    finally:
        executor.close()
    wait_for(lambda: all(map(gone, pids)))


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2), Topology(ep=2)], ids=str)
def test_adapters_over_nodes_give_the_tokens_of_ranks_here(
    cluster: str, topology: Topology, tmp_path: Path
) -> None:
    """Three adapters and the base model over two slots: both nodes load and drop them at the same steps."""
    adapters = make_adapters(tmp_path, MODELS["llama"]())
    case = Case("llama", "bfloat16", 31, num_requests=8, cpu_isa=LEVEL, adapters=adapters)
    config = config_of(case, topology)
    here = RanksExecutor(config)
    try:
        truth = alone_on(case, here, config)
    finally:
        here.close()
    executor = RanksExecutor(replace(config, ray=RayConfig(cluster, 2)), start=start_on_ray)
    pids = executor.pids
    try:
        tally = serve(case, executor, config, FCFS, truth).tally
    finally:
        executor.close()
    assert tally.num_adapter_loads > 0
    wait_for(lambda: all(map(gone, pids)))


def _kill_daemon(node: subprocess.Popen[bytes], *, alone: bool) -> None:
    """Kill Ray's daemon on ``node``; ``alone``: and before it what would then end the other processes there."""
    below = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _descendants(node.pid)}
    (raylet,) = (pid for pid, command in below.items() if command.partition(b"\0")[0].endswith(b"/raylet"))
    if alone:
        os.kill(node.pid, signal.SIGKILL)
        node.wait(30)
    os.kill(raylet, signal.SIGKILL)


@pytest.mark.slow
@needs_ray
@pytest.mark.parametrize("alone", [False, True], ids=["with its node", "alone"])
def test_streams_go_on_after_the_death_of_rays_daemon(cluster: str, alone: bool) -> None:
    """The ranks of its node end with it, and the engine starts again on the nodes that are left: no token differs.

    `ray start --block` would end its node with the daemon; ``alone``, nothing does but Ray's workers.
    """
    third = _start_node(["--address", cluster])
    wait_for(lambda: _num_nodes() == 3, seconds=120.0)
    args = EngineArgs(
        num_kv_blocks=2048, max_model_len=512, threads=1, pipeline_parallel_size=3, executor="ray",
        ray_address=cluster,
    )  # fmt: skip
    config, checkpoint = configure(args, detect_device())
    text, below, ranks = load_text(args, config, checkpoint), list[int](), list[int]()

    async def main() -> None:
        def start() -> ProcessClient:
            return ProcessClient(config, executor=executor_of(args))

        policy = RestartPolicy(backoff_s=1.0, max_restarts=10, hang_timeout_s=0.0)
        supervisor = Supervisor(start(), start, WallClock(), policy)
        frontend = Frontend(supervisor, text.tokenizer, text.chat_template, text.model, WallClock())
        await frontend.start()

        async def ask(index: int) -> tuple[OutputChunk, ...]:
            params = SamplingParams(max_tokens=300, ignore_eos=True, seed=index, temperature=0.9)
            return await (await frontend.submit(f"Story {index}: once", params)).collect()

        async def disturb() -> None:
            while supervisor.stats().num_generated_tokens < 20:
                await asyncio.sleep(0.02)
            below.extend(_descendants(third.pid))
            ranks.extend(pid for pid in below if b"quire: rank" in Path(f"/proc/{pid}/cmdline").read_bytes())
            assert ranks
            _kill_daemon(third, alone=alone)
            async with asyncio.timeout(120.0):  # Ray's workers take a while to see it
                while supervisor.num_restarts == 0 or supervisor.health().status != "ready":
                    await asyncio.sleep(0.05)

        disturbing = asyncio.ensure_future(disturb())
        disturbed = await asyncio.gather(*[ask(i) for i in range(4)])
        await disturbing
        wait_for(lambda: all(map(gone, ranks)))
        assert disturbed == await asyncio.gather(*[ask(i) for i in range(4)])
        await frontend.close()

    try:
        asyncio.run(main())
    finally:
        _end(third)
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    wait_for(lambda: _num_nodes() == 2, seconds=120.0)


@pytest.mark.slow
@needs_ray
def test_a_killed_rank_ends_the_group_on_every_node(cluster: str) -> None:
    config = replace(config_of(CASE, TWO), ray=RayConfig(cluster, 2))
    executor = RanksExecutor(config, start=start_on_ray)
    pids = executor.pids
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: gone(pids[0]))
    with pytest.raises(EngineDeadError, match=r"Rank 0 \(process \d+ on .*\) was killed by signal 9"):
        _steps(executor)
    wait_for(lambda: all(map(gone, pids)))


@pytest.mark.slow
@needs_ray
def test_a_node_that_leaves_ends_the_group_and_its_processes(cluster: str) -> None:
    """The other nodes go on: the engine starts again on them."""
    third = _start_node(["--address", cluster])
    wait_for(lambda: _num_nodes() == 3, seconds=120.0)
    executor = RanksExecutor(
        replace(config_of(CASE, Topology(pp=3)), ray=RayConfig(cluster, 3)), start=start_on_ray
    )
    pids = executor.pids
    _end(third)
    with pytest.raises(EngineDeadError, match=r"Rank \d \(process \d+ on .*\)"):
        _steps(executor)
    wait_for(lambda: all(map(gone, pids)))
    wait_for(lambda: _num_nodes() == 2, seconds=120.0)
    again = _started_again(replace(config_of(CASE, TWO), ray=RayConfig(cluster, 2)))
    again.submit(StepPlan(0))
    assert again.collect().error is None
    again.close()


def _started_again(config: EngineConfig) -> RanksExecutor:
    """Try as the supervisor does: Ray may still be ending workers of the group before."""
    for _ in range(4):
        with suppress(EngineDeadError):
            return RanksExecutor(config, start=start_on_ray)
        time.sleep(2.0)
    return RanksExecutor(config, start=start_on_ray)


@pytest.mark.slow
@needs_ray
def test_more_nodes_than_the_cluster_has_is_one_line(cluster: str) -> None:
    config = replace(config_of(CASE, Topology(tp=2, pp=2)), ray=RayConfig(cluster, 4))
    with pytest.raises(ConfigError, match="nodes = 4: the Ray cluster has 2"):
        start_on_ray(config)


@pytest.mark.slow
@needs_ray
def test_other_weights_on_a_node_are_refused_with_both_hashes(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "fingerprint", lambda _: "0" * 24)
    config = replace(config_of(CASE, TWO), ray=RayConfig(cluster, 2))
    with pytest.raises(Exception, match=r"has the fingerprint [0-9a-f]{24}, and the engine's has 0{24}"):
        start_on_ray(config)


@pytest.mark.slow
@needs_ray
def test_another_version_on_a_node_is_refused_with_both(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "__version__", "0.0.0")
    config = replace(config_of(CASE, TWO), ray=RayConfig(cluster, 2))
    with pytest.raises(ConfigError, match=rf"Quire is {re.escape(__version__)} on .* and 0\.0\.0 here"):
        start_on_ray(config)


@pytest.mark.slow
@needs_ray
def test_a_dead_head_is_one_line(cluster: str) -> None:
    """A process of its own: this one is connected."""
    script = f"""
from dataclasses import replace
from quire.config import EngineConfig, RayConfig
from quire.errors import ConfigError
from quire.executor.ray import start_on_ray
from tests.parallel.serving import CASE, config_of
from quire.parallel.topology import Topology
try:
    start_on_ray(replace(config_of(CASE, Topology(pp=2)), ray=RayConfig("127.0.0.1:{free_port()}", 2)))
except ConfigError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    assert re.match(r"refused: ray_address = '127\.0\.0\.1:\d+': no Ray cluster answers there: ", lines[0])


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = replace(config_of(CASE, TWO), ray=RayConfig(None, None))
    with pytest.raises(ConfigError, match=r"needs the extra 'ray' .*pip install 'quire-llm\[ray\]'"):
        start_on_ray(config)


def _memory_of_the_dead() -> set[str]:
    """Return the segments whose makers, which their names have, are gone."""
    names = [each.name for each in Path("/dev/shm").glob("quire-*-*") if each.name.split("-")[1].isdecimal()]
    return {name for name in names if gone(int(name.split("-")[1]))}


def _steps(executor: RanksExecutor) -> None:
    for step in range(3000):  # its sockets close a moment after a signal
        executor.submit(StepPlan(step))
        executor.collect()
        time.sleep(0.005)
