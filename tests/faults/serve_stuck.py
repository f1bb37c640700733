"""A supervised server whose first engine gets stuck: ``python -m tests.faults.serve_stuck SECONDS``.

The stuck step holds the GIL nearly all the time, as a loop of native calls would.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from datetime import datetime
from pathlib import Path

from tests.api.asgi_client import app_with_jobs
from tests.engine.toy import byte_tokenizer, engine_config, model_info
from tests.fakes.engine import FAKE, build

from quire.api.server import run
from quire.clock import WallClock
from quire.config import EngineConfig
from quire.engine.frontend import Frontend
from quire.engine.process import ProcessClient
from quire.engine.supervisor import RestartPolicy, Supervisor
from quire.executor.base import Executor
from quire.metrics.log import configure
from quire.step import StepPlan, StepResult
from quire.text.chat_template import ChatTemplate

_STUCK_STEP = 3


class Stuck:
    """An executor whose step 3 holds the GIL for so many seconds."""

    def __init__(self, inner: Executor, seconds: int) -> None:
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps
        self._inner, self._seconds = inner, seconds

    def submit(self, plan: StepPlan) -> None:
        self._inner.submit(plan)
        self._step = plan.step

    def collect(self) -> StepResult:
        if self._step == _STUCK_STEP:
            stuck(self._seconds)
        return self._inner.collect()

    def close(self) -> None:
        self._inner.close()


def stuck(seconds: int) -> None:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:  # a signal ends the sleep
        ctypes.PyDLL(None).usleep(100_000)  # PyDLL keeps the GIL


def build_stuck(config: EngineConfig, seconds: str) -> Executor:
    return Stuck(build(config, "5"), int(seconds))


def main(seconds: str) -> int:
    configure("info")
    config = engine_config()
    client = Supervisor(
        ProcessClient(config, executor=f"tests.faults.serve_stuck:build_stuck@{seconds}"),
        lambda: ProcessClient(config, executor=f"{FAKE}@5"),
        WallClock(),
        RestartPolicy(hang_timeout_s=2.0),
    )
    tokenizer = byte_tokenizer()
    template = ChatTemplate.of(tokenizer, datetime.now)
    frontend = Frontend(client, tokenizer, template, model_info(), WallClock())
    folder = Path(os.environ["TMPDIR"]) / "batches"
    return run(app_with_jobs(frontend, batch_dir=str(folder)), port=0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
