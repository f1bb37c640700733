"""The engine's own process: ``python -m quire.engine.child FD DIRECTORY EXECUTOR``, started by `quire.engine.spawn`.

    inbox.ipc   PULL  <── Boot, then messages for the core
    events.ipc  PUSH  ──> EngineInfo | Failure, then Events and EngineStats

The loop blocks in `poll` while there is no work; while there is, it drains the inbox without blocking. SIGINT and
SIGTERM are for the parent to handle (it drains); this process ends when its connection to the parent closes.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import shutil
import signal
import socket
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq
from setproctitle import setproctitle

from quire.clock import Clock, WallClock
from quire.engine.build import build_core, describe, preload
from quire.engine.core import EngineCore
from quire.engine.heartbeat import IDLE_TICK_S, Heartbeat, Ticker
from quire.engine.process import Boot, Events, Failure, decode, encode
from quire.engine.recording_file import saver
from quire.engine.spawn import HEARTBEAT, PLANS, STACKS
from quire.errors import QuireError
from quire.executor.child_process import PrefixedStream, wake_at_parents_end
from quire.metrics.log import Log, configure
from quire.scheduler.scheduler import Sleep, audit
from quire.scheduler.scheduler import describe as describe_plan
from quire.step import StepPlan

STATS_INTERVAL_S = 0.5
AUDIT_AFTER_S = 1.0  # without work
log = Log("engine")


def main(argv: list[str]) -> None:
    """Run until the parent goes away."""
    setproctitle("quire: engine")
    life_fd, directory, executor = int(argv[1]), argv[2], argv[3]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    wake_at_parents_end()
    dump = _Dump(directory)
    threading.Thread(target=_follow_parent, args=(life_fd, directory, dump), daemon=True).start()
    stderr = sys.stderr
    sys.stderr = sys.stdout = PrefixedStream(stderr, "engine")
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for end in (inbox, outbox):
        end.set_hwm(0)  # the scheduler's queue bounds what is in flight
    try:
        inbox.bind(f"ipc://{directory}/inbox.ipc")
        outbox.connect(f"ipc://{directory}/events.ipc")
    except zmq.ZMQError:
        if not os.path.isdir(directory):
            # The parent has ended and cleaned up, so there is nothing to report to.
            os._exit(0)
        raise
    # In ms: a failure has to reach the parent before this process ends.
    outbox.linger = 1000
    try:
        # What is imported stays, so it is not searched for garbage: that takes a tenth of the time of the imports.
        gc.disable()
        preload(executor)
        gc.freeze()
        gc.enable()
        boot = decode(inbox.recv_multipart())
        assert isinstance(boot, Boot)
        # With a prefix, a line of JSON would not be JSON any more. Its field `name` says which process wrote it.
        configure(boot.log_level, stream=stderr if boot.log_format == "json" else None, style=boot.log_format)
        clock = WallClock()
        start_s = clock.now()
        runner = replace(boot.config.runner, prepares_grammars=True)
        core = build_core(replace(boot.config, runner=runner), executor, clock)
        dump.core = core
        if core.recorder is not None:
            core.save = saver(core.recorder, boot.config)
            signal.signal(
                signal.SIGUSR2, lambda *_: threading.Thread(target=dump.save, args=("signal",)).start()
            )
        ticker: Ticker | None = None
        if boot.watches_hangs:
            page = Heartbeat(Path(directory, HEARTBEAT))
            core.on_tick = ticker = Ticker(page, core.scheduler, clock)
            ticker.idle(clock.now())
        outbox.send_multipart(encode(describe(boot.config, executor, clock.now() - start_s, core.ranks)))
        serve(core, inbox, outbox, clock, ticker)
    except Exception as error:
        if log.is_debugging() or not isinstance(error, QuireError):
            traceback.print_exc()
        dump.save("crash", f"{type(error).__name__}: {error}")
        outbox.send_multipart(encode(Failure(type(error).__name__, _one_line(error))))
        context.destroy()
        shutil.rmtree(directory, ignore_errors=True)
        raise SystemExit(1) from None


def serve(
    core: EngineCore, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], clock: Clock, ticker: Ticker | None
) -> None:
    """The loop: drain the inbox, step, send the step's events as one message."""
    stats_s = clock.now()
    outbox.send_multipart(encode(core.stats()))
    while True:
        _wait(core, inbox, clock, ticker)
        for message in _drain(inbox):
            core.put(message)
        events = core.step()
        if events or core.replies:
            outbox.send_multipart(encode(Events(events, core.replies)))
            core.replies.clear()
        while core.rejected:
            log.error("policy_change_rejected", error=core.rejected.pop(0))
        now_s = clock.now()
        if core.rest is not None or now_s - stats_s >= STATS_INTERVAL_S:
            outbox.send_multipart(encode(core.stats()))
            stats_s = now_s


def _wait(core: EngineCore, inbox: zmq.Socket[bytes], clock: Clock, ticker: Ticker | None) -> None:
    """Wait until there is something to do, with a tick every `IDLE_TICK_S`; do not wait while there is work.

    After a second, the books of the cache are looked at once.
    """
    rest = core.rest
    if rest is None:
        return
    until_s = rest.until_s if isinstance(rest, Sleep) else math.inf
    audit_s: float | None = clock.now() + AUDIT_AFTER_S
    while (now_s := clock.now()) < until_s:
        if ticker is not None:
            ticker.idle(now_s)
        if audit_s is not None and now_s >= audit_s:
            audit_s = None
            if num_blocks := audit(core.scheduler):
                log.error("blocks_reclaimed", blocks=num_blocks)
        next_s = until_s if audit_s is None else min(until_s, audit_s)
        if ticker is not None:
            next_s = min(next_s, now_s + IDLE_TICK_S)
        if inbox.poll(None if math.isinf(next_s) else math.ceil((next_s - now_s) * 1e3)):
            return


def _drain(inbox: zmq.Socket[bytes]) -> list[Any]:
    messages = []
    try:
        while True:
            messages.append(decode(inbox.recv_multipart(zmq.NOBLOCK)))
    except zmq.Again:
        return messages


class _Dump:
    """Answers the parent, which believes that the loop hangs: plans and stacks, in files of the private directory.

    Late is not hung: on a busy machine the loop may go on a moment later. So the threads' stacks are taken under the
    GIL, and the signal, which reads them while they change and may crash the process, comes only before it is killed.
    """

    def __init__(self, directory: str) -> None:
        self.core: EngineCore | None = None
        self._plans = Path(directory, PLANS)
        # Open for as long as the process lives.
        self._stacks = Path(directory, STACKS).open("w")  # noqa: SIM115
        # In C: needs neither the GIL nor a thread that runs.
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    def save(self, reason: str, text: str = "") -> None:
        """Save what the flight recorder has, if it is on. A failure is logged."""
        if self.core is None or self.core.save is None:
            return
        try:
            self.core.save(reason, text)
        except Exception as error:  # a full disk, as a rule; what called has more to do
            log.error("recording_not_saved", error=error)

    def write_plans(self) -> None:
        if self.core is not None:
            core = self.core
            plans = [
                describe_plan(core.scheduler, out) for out in tuple(core.out) if isinstance(out, StepPlan)
            ]
            text = "\n".join(plans) or "no step is out"
            self._plans.write_text(f"{text}\n\n{_stacks()}")


def _stacks() -> str:
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    )


def _follow_parent(life_fd: int, directory: str, dump: _Dump) -> None:
    """Write a dump for each byte from the parent; end when the parent closes its end or dies."""
    life = socket.socket(fileno=life_fd)
    while life.recv(1):
        try:
            dump.write_plans()
        except Exception as error:  # the loop may have moved on meanwhile
            log.warning("dump_failed", error=error)
        dump.save("hang")
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, QuireError) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main(sys.argv)
