"""Faults of tiers under real servers: ``python -m tests.faults.kv_tier --tier real``.

Three servers of Quill: one with a tier on disk, one that gives its blocks to peers, and one that takes them. Each fault
meets requests whose blocks are being stored or loaded; afterwards every prompt is asked again. Wrong is an answer that
differs from what a server without a cache gives; stuck is a request without an answer after three minutes; leaked are
blocks, requests, files or threads that a server has more of than before.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.live import LiveServer
from tests.e2e.test_e2e_kv_tier import tree
from tests.fakes.slow_files import SlowFiles
from tests.faults.processes import engine_of, stopped
from tests.faults.report import table
from tests.gateway.services import free_port

TITLE = "Tiers of real servers"
LIMIT_S = 180.0  # of an answer
START_S = 600.0
STORY = "It was a dark and stormy night, and the rain fell in torrents. "
NUM_PROMPTS = 12
PLAIN = ("-m", "quire.cli", "serve", "quill", "--port", "0", "--admin-port", "0", "--threads", "1")
SECRET = {"QUIRE_KV_SECRET": "the secret of two servers"}


@dataclass(slots=True)
class Outcome:
    """What the faults came to."""

    seen: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0
    num_lost: int = 0  # requests whose server was killed
    loaded: Counter[str] = field(default_factory=Counter)  # tokens, by server
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        return [*self.wrong, *self.stuck, *self.leaked]


def prompt_of(number: int) -> str:
    return f"Chapter {number}. {STORY * (10 + number % 5 * 8)}"


class Place:
    """A server that is started again after it was killed."""

    def __init__(self, name: str, work: Path, *tier: str, **env: str) -> None:
        self.name, self._work, self._tier, self._env = name, work, tier, env
        self._num_lives = 0
        self.server: LiveServer
        self.held: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self._num_lives += 1
        log = self._work / f"{self.name}-{self._num_lives}.log"
        self.server = LiveServer([*PLAIN, *self._tier], log, self._env, start_s=START_S)
        self.held = {}

    def stop(self) -> None:
        self.server.stop()

    def kill(self) -> None:
        for pid in tree(self.server.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.server.process.wait(30)

    def forget_memory(self) -> None:
        httpx.post(self.server.admin_url + "/reset_prefix_cache", timeout=LIMIT_S)

    def more_than_before(self, wait_s: float = 30.0) -> str:
        """Say what it holds, though nothing runs, that it did not hold at its first rest."""
        until_s = time.monotonic() + wait_s
        while True:
            held = self._holds()
            if not self.held:
                self.held = held
            slack = {"files": 24, "threads": 12}
            more = {key: v for key, v in held.items() if v > self.held.get(key, 0) + slack.get(key, 0)}
            if not more or time.monotonic() > until_s:
                return f"{self.name}: {more}, before {self.held}" if more else ""
            time.sleep(0.1)

    def _holds(self) -> dict[str, float]:
        metric = self.server.metric
        pid = engine_of(self.server)
        return {
            "running": metric("vllm:num_requests_running"),
            "waiting": metric("vllm:num_requests_waiting"),
            "blocks": metric("quire:kv_blocks")
            - metric("quire:kv_blocks_free")
            - metric("quire:kv_blocks_idle"),
            "files": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
        }


class Servers:
    """The servers of a campaign, and what they answer."""

    def __init__(
        self, opened: ExitStack, work: Path, folder: Path, files: SlowFiles, outcome: Outcome, seed: int
    ) -> None:
        self.folder, self.files, self.outcome, self.dice = folder, files, outcome, random.Random(seed)
        self._calls = ThreadPoolExecutor(8)
        opened.callback(self._calls.shutdown)
        with ExitStack() as first:
            alone = LiveServer([*PLAIN, "--no-enable-prefix-caching"], work / "alone.log", start_s=START_S)
            first.callback(alone.stop)
            self.truth = {n: self._post(alone, n)[0] for n in range(NUM_PROMPTS)}
        give, take = free_port(), free_port()
        self.disk = Place("disk", work, "--kv-disk", f"{folder}:16MiB", **files.env)
        opened.callback(self.disk.stop)
        self.giver = Place("giver", work, "--kv-share", f"127.0.0.1:{give}:64MiB", **SECRET)
        opened.callback(self.giver.stop)
        peers = "--kv-share", f"127.0.0.1:{take}:1MiB", "--kv-peers", f"127.0.0.1:{give}"
        self.taker = Place("taker", work, *peers, **SECRET)
        opened.callback(self.taker.stop)
        self.places = (self.disk, self.giver, self.taker)
        for place in (self.disk, self.giver):
            self.check(place, range(NUM_PROMPTS))

    def some(self, count: int = 3) -> list[int]:
        return self.dice.sample(range(NUM_PROMPTS), count)

    def check(self, place: Place, numbers: Any) -> None:
        """Ask prompts of a server that is well, one after another."""
        for number in numbers:
            self._judge(place, number, lost_is_wrong=True)

    @contextmanager
    def asking(self, place: Place, *, lost_is_wrong: bool) -> Iterator[None]:
        """Ask a few prompts at once while the block runs."""
        place.forget_memory()
        calls = [
            self._calls.submit(self._judge, place, number, lost_is_wrong=lost_is_wrong)
            for number in self.some()
        ]
        time.sleep(self.dice.uniform(0.0, 0.4))
        yield
        for call in calls:
            call.result()

    def _judge(self, place: Place, number: int, *, lost_is_wrong: bool) -> None:
        outcome = self.outcome
        try:
            text, loaded = self._post(place.server, number)
        except httpx.TimeoutException:
            outcome.stuck.append(f"{place.name}: prompt {number}")
            return
        except httpx.HTTPError as error:
            outcome.num_lost += 1
            if lost_is_wrong:
                outcome.wrong.append(f"{place.name}: prompt {number}: {error!r}")
            return
        outcome.num_answers += 1
        outcome.loaded[place.name] += loaded
        if text != self.truth[number]:
            outcome.wrong.append(f"{place.name}: prompt {number}: {text!r} and not {self.truth[number]!r}")

    @staticmethod
    def _post(server: LiveServer, number: int) -> tuple[str, int]:
        body = {"prompt": prompt_of(number), "max_tokens": 12, "temperature": 0, "timing": True}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=LIMIT_S)
        data = answer.raise_for_status().json()
        return data["choices"][0]["text"], int(data["timing"].get("loaded_tokens", 0))


def _killed(servers: Servers, place: Place, victim: Place) -> None:
    with servers.asking(place, lost_is_wrong=place is not victim):
        victim.kill()
    victim.start()
    if victim is servers.giver:
        servers.check(victim, servers.some(6))


def _stopped(servers: Servers, place: Place, victim: Place) -> None:
    with servers.asking(place, lost_is_wrong=True), stopped(engine_of(victim.server)):
        time.sleep(servers.dice.uniform(0.1, 0.8 if place is victim else 3.0))


def _with_files(servers: Servers, **state: int) -> None:
    servers.files.set(**state)
    try:
        with servers.asking(servers.disk, lost_is_wrong=True):
            time.sleep(1.0)
    finally:
        servers.files.set()


def _full(servers: Servers) -> None:
    """Other files take all room, while the segments that there are stay."""
    filler = servers.folder.parent / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        servers.disk.forget_memory()
        with servers.asking(servers.disk, lost_is_wrong=True):
            time.sleep(0.5)
    finally:
        filler.unlink()


def _removed(servers: Servers) -> None:
    with servers.asking(servers.disk, lost_is_wrong=True):
        for path in servers.folder.rglob("*.seg"):
            path.unlink(missing_ok=True)


FAULTS: dict[str, Callable[[Servers], None]] = {
    "kill -9 of a server that stores and loads": lambda s: _killed(s, s.disk, s.disk),
    "kill -9 of the peer that gives": lambda s: _killed(s, s.taker, s.giver),
    "kill -9 of the peer that takes": lambda s: _killed(s, s.taker, s.taker),
    "SIGSTOP of an engine that stores and loads": lambda s: _stopped(s, s.disk, s.disk),
    "SIGSTOP of the peer that gives": lambda s: _stopped(s, s.taker, s.giver),
    "SIGSTOP of the peer that takes": lambda s: _stopped(s, s.taker, s.taker),
    "full file system": _full,
    "file system of 1 MB/s": lambda s: _with_files(s, bytes_per_s=1_000_000),
    "reads fail (EIO)": lambda s: _with_files(s, read_errno=errno.EIO),
    "writes fail (EIO)": lambda s: _with_files(s, write_errno=errno.EIO),
    "segments removed": _removed,
}


def campaign(num_faults: int, seed: int) -> Outcome:
    """Inject each kind in turns; a file system of its own is mounted, so this needs root."""
    outcome = Outcome()
    with ExitStack() as opened:
        work = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="quire-faults-kv-")))
        disk = work / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "quire-test", str(disk)], check=True)
        opened.callback(subprocess.run, ["umount", "-l", str(disk)], check=True)
        folder = disk / "kv"
        folder.mkdir(mode=0o700)
        servers = Servers(opened, work, folder, SlowFiles(work, folder), outcome, seed)
        kinds = list(FAULTS)
        for number in range(num_faults):
            kind = kinds[number % len(kinds)]
            FAULTS[kind](servers)
            outcome.seen[kind] += 1
            for place in servers.places:
                place.forget_memory()
                servers.check(place, servers.some(2))
                if more := place.more_than_before():
                    outcome.leaked.append(f"after {kind}: {more}")
            print(number + 1, kind, outcome.num_answers, dict(outcome.loaded), outcome.failures, flush=True)
        if outcome.failures:
            shutil.copytree(work, "/tmp/quire-faults-kv-logs", ignore=shutil.ignore_patterns("disk"))
    return outcome


def report(outcome: Outcome, seed: int) -> str:
    """Return the section of the results."""
    loaded = ", ".join(f"{count:,} by the {name}" for name, count in sorted(outcome.loaded.items()) if count)
    return "\n\n".join(
        (
            f"{outcome.seen.total()} faults of servers of Quill, each while three requests ran: "
            f"{outcome.num_answers:,} answers, {outcome.num_lost} requests of servers that were killed; tokens loaded: "
            f"{loaded}; seed {seed}. Wrong answers {len(outcome.wrong)}, stuck {len(outcome.stuck)}, leaked "
            f"{len(outcome.leaked)}. tests/faults/kv_processes.py says what is asked and compared.",
            table(("fault", "times"), [(kind, str(count)) for kind, count in outcome.seen.items()]),
            *outcome.failures,
        )
    )
