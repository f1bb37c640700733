"""`RanksExecutor`: real processes. One rank computes what the local executor does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.test_process import gone, wait_for
from tests.exact.engine_run import Policy
from tests.parallel.serving import CASE, FCFS, config_of, serve

from quire.errors import EngineDeadError, ModelLoadError
from quire.executor.rank_messages import Answer, Channel, Told, encode
from quire.executor.ranks import RanksExecutor
from quire.parallel.topology import Topology
from quire.step import StepPlan, StepResult

OTHERS = (Policy("continuous", "priority", 48), Policy("static", "fcfs", 48))


@pytest.fixture(scope="module")
def one() -> Iterator[RanksExecutor]:
    executor = RanksExecutor(config_of(CASE, Topology()))
    yield executor
    pids = executor.pids
    executor.close()
    assert all(map(gone, pids))


@pytest.mark.parametrize("policy", [FCFS, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
def test_one_rank_gives_the_tokens_of_this_process(one: RanksExecutor, policy: Policy) -> None:
    tally = serve(CASE, one, config_of(CASE, Topology()), policy).tally
    assert tally.num_forks > 0
    assert tally.num_moves > 0
    assert tally.num_chunked_prompts > 0


def test_a_rank_has_its_name_and_its_pid(one: RanksExecutor) -> None:
    (pid,) = one.pids
    assert Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0") == b"quire: rank 0"
    assert [each.pid for each in one.loaded] == [pid]


def test_a_killed_rank_ends_the_group_by_name() -> None:
    executor = RanksExecutor(config_of(CASE, Topology()))
    (pid,) = executor.pids
    executor.submit(StepPlan(0))
    assert executor.collect().error is None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"Rank 0 \(process \d+\) was killed by SIGKILL"):
        _step(executor)
    assert gone(pid)
    executor.close()


def test_a_model_that_cannot_load_is_one_line(tmp_path: Path) -> None:
    config = config_of(CASE, Topology())
    model = replace(config.model, path=str(tmp_path))
    before = set(_ranks())
    with pytest.raises(ModelLoadError, match=r"Rank 0 \(process \d+\): ") as raised:
        RanksExecutor(replace(config, model=model))
    assert "\n" not in str(raised.value)
    wait_for(lambda: set(_ranks()) <= before)


def test_frames_keep_large_messages_whole() -> None:
    ours, theirs = socket.socketpair()
    answer = Answer(StepResult(7, error="x" * 2_000_000), Told(7, failed=True))
    sending = threading.Thread(target=Channel(theirs).send, args=(encode(answer),))
    sending.start()
    assert Channel(ours).receive() == answer
    sending.join()
    theirs.close()
    assert Channel(ours).receive() is None
    ours.close()


def _step(executor: RanksExecutor) -> None:
    executor.submit(StepPlan(1))  # it may be on its way before the death is seen
    executor.collect()


def _ranks() -> list[str]:
    """The processes of this test that are ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_bytes()
            if b"quire.executor.rank" in command or b"quire: rank" in command:
                parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
                found += [path.name] if int(parent) == os.getpid() else []
        except OSError:
            continue
    return found


ASK = (
    'LLM("quill", tensor_parallel_size=2, threads=1, num_kv_blocks=64).generate(["Once upon"])[0].outputs[0]'
)
PLAIN = f"from quire import LLM\nprint({ASK}.token_ids)\n"
GUARDED = f"""from quire import LLM

def main():
    print({ASK}.token_ids)

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_a_script_needs_no_main_guard(tmp_path: Path) -> None:
    printed = set()
    for name, text in {"plain.py": PLAIN, "guarded.py": GUARDED}.items():
        (tmp_path / name).write_text(text)
        done = subprocess.run(
            [sys.executable, tmp_path / name], capture_output=True, text=True, timeout=300, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout)
    assert len(printed) == 1, printed
