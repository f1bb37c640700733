"""Profiles: a trace that parses, with ops that fill the forward, the same tokens, and nothing wrapped afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.build import build_core
from quire.engine.core import EngineCore
from quire.errors import ConfigError
from quire.executor.profile_control import TakeProfile
from quire.kernels.registry import native
from quire.request import Request, SamplingParams

pytestmark = pytest.mark.skipif(native is None, reason="the native extension is not built")


def core_of(folder: Path | None, steps: int | None = None) -> EngineCore:
    args = EngineArgs(
        "quill", num_kv_blocks=64, max_model_len=256, threads=1,
        profile_dir=None if folder is None else str(folder), profile_steps=steps,
    )  # fmt: skip
    config, _ = configure(args, detect_device())
    return build_core(config, "local", WallClock())


def tokens(core: EngineCore, name: str = "a") -> list[int]:
    core.put(Request(name, tuple(range(30, 60)), SamplingParams(max_tokens=12, ignore_eos=True, seed=1), 0.0))
    found: list[int] = []
    while core.has_work:
        for event in core.step():
            found += event.token_ids
    return found


def test_a_trace_has_steps_whose_ops_add_up(tmp_path: Path) -> None:
    expected = tokens(core_of(None))
    core = core_of(tmp_path / "new", steps=8)
    assert tokens(core) == expected
    (path,) = (tmp_path / "new").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    spans = {
        name: sum(e["dur"] for e in events if e["name"] == name) for name in ("step", "forward", "sample")
    }
    ops = [e for e in events if e["name"] not in spans]
    assert sum(e["name"] == "step" for e in events) == 8
    assert all(e["ph"] == "X" and e["dur"] >= 0 for e in events)
    assert sum(e["dur"] for e in ops) <= spans["forward"] < spans["step"]
    shares = [
        sum(e["dur"] for e in ops if f["ts"] <= e["ts"] <= f["ts"] + f["dur"]) / f["dur"]
        for f in events if f["name"] == "forward"
    ]  # fmt: skip
    assert 0.5 < max(shares) <= 1, "of the step that other processes disturbed least"
    top = trace["otherData"]["top"]
    assert "Linear" in [each["op"] for each in top[:2]], "sampling may take longer beside other work"
    assert top[0]["bytes"] > 1e6
    assert top[0]["of_bound"] > 0
    assert len(top) == 5
    worker = core.executor.worker  # type: ignore[attr-defined]
    assert "execute" not in vars(worker)
    assert "run" not in vars(worker.runner.tape)
    assert "_sample" not in vars(worker.runner)


def test_messages_start_and_stop_a_profile(tmp_path: Path) -> None:
    core = core_of(tmp_path)

    def ask(*, start: bool) -> tuple[dict[str, object], str | None]:
        core.put(TakeProfile("1", start))
        core.begin()
        reply = core.replies.pop()
        return reply.values, reply.error

    assert "No profile is on" in str(ask(start=False)[1])
    assert ask(start=True)[0]["state"] == "on"
    assert "is on already" in str(ask(start=True)[1])
    tokens(core)
    said, error = ask(start=False)
    assert error is None
    assert Path(str(said["path"])).exists()
    assert said["num_steps"] == 12


def test_a_profile_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="profile_steps needs profile_dir"):
        core_of(None, steps=3)
    assert "--profile-dir" in str(TakeProfile("1", start=True).carry_out(None)["error"])
