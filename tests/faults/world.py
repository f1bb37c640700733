"""`World`: one live server that faults are injected into, the commands that start it, and what it holds at the end."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file
from tests.e2e.live import LiveServer
from tests.lora.peft_files import make_adapters

from quire.models.checkpoint import describe
from quire.models.hub import locate

TINY = {"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0}
HANG_TIMEOUT_S = 3.0
PATIENCE_S = 300.0  # of a start or a restart on a machine that others load
FLAGS = ("--port", "0", "--threads", "1", "--tool-format", "hermes", "--max-restarts", "999", "--admin-port", "0",
         "--hang-timeout-s", f"{HANG_TIMEOUT_S:g}")  # fmt: skip
# Settings of the engine, each with tokens of its own.
ENGINES: dict[str, tuple[str, ...]] = {
    "bfloat16": (),
    "int8 weights and KV": ("--quantize", "int8", "--kv-dtype", "int8"),
    "speculation": ("--speculate", "ngram"),
}
# Become the server inside of a mount namespace with a small file system of its own at argv[1].
_MOUNTED = (
    "import os, sys; where, size = sys.argv[1:3]; command = [sys.executable, *sys.argv[3:]]; "
    "script = 'mount -t tmpfs -o size=' + size + ' tmpfs ' + where + ' && exec \"$0\" \"$@\"'; "
    "os.execvp('unshare', ['unshare', '-m', 'sh', '-c', script, *command])"
)


def may_mount() -> bool:
    """Return whether this machine lets us make a mount namespace."""
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False
    )
    return done.returncode == 0


class World:
    """A server of Quill with adapters ``warm`` and, loaded at run time, ``poison`` (of NaN)."""

    def __init__(
        self,
        seed: int,
        engine: str = "bfloat16",
        *,
        place: str | None = None,
        template: str | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        """``place``: "shm", "tmp" or "batches", which then is a small file system of the server's own.

        ``template``: the source of a chat template in the place of the model's. ``flags``: more of ``quire serve``.
        """
        self.rng = Random(seed)
        self.template, self._flags = template, flags
        self.engine, self.place = engine, place
        self.notes: dict[str, list[float]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="qf-")
        self.folder = Path(self._folder.name)
        self.clock = self.folder / "clock"
        self.clock.write_bytes(bytes(8))
        self.adapter = make_adapters(self.folder / "adapters", describe(locate("quill")).spec)[0]
        self.server = self._start()

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def mount(self) -> Path:
        """The small file system, as this process reaches it."""
        return Path(f"/proc/{self.server.process.pid}/root{self._place()}")

    def _place(self) -> str:
        own = self.folder / (self.place or "none")
        return "/dev/shm" if self.place == "shm" else str(own)

    def _start(self) -> LiveServer:
        batches = self._place() if self.place == "batches" else str(self.folder / "kept")
        command = ["-m", "quire.cli", "serve", "quill", *FLAGS, *ENGINES[self.engine], *self._flags,
                   "--batch-dir", batches, "--lora", f"warm={self.adapter.path}"]  # fmt: skip
        if self.template is not None:
            (self.folder / "template.jinja").write_text(self.template)
            command += ["--chat-template", str(self.folder / "template.jinja")]
        env = {"QUIRE_TEST_CLOCK": str(self.clock)}
        library = wall_clock_library(self.folder)
        if library is not None:
            env["LD_PRELOAD"] = str(library)
        if self.place is not None:
            Path(self._place()).mkdir(exist_ok=True)
            size = {"shm": "4m", "tmp": "4m", "batches": "256k"}[self.place]
            command = ["-c", _MOUNTED, self._place(), size, *command]
            env |= {"TMPDIR": self._place()} if self.place == "tmp" else {}
        return LiveServer(command, self.folder / "log", env=env, start_s=PATIENCE_S)

    def poison(self) -> Path:
        """Return the folder of an adapter whose weights are NaN."""
        folder = self.folder / "poison"
        if not folder.exists():
            shutil.copytree(self.adapter.path, folder)
            file = folder / "adapter_model.safetensors"
            save_file(
                {name: torch.full_like(each, float("nan")) for name, each in load_file(file).items()}, file
            )
        return folder

    def note(self, name: str, value: float) -> None:
        self.notes.setdefault(name, []).append(value)

    async def call(self, method: str, url: str, timeout_s: float = 60.0, **kwargs: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=timeout_s) as client:
            return await client.request(method, url if "://" in url else self.url + url, **kwargs)

    async def served_again(self, since_s: float, limit_s: float = PATIENCE_S) -> float:
        """Wait until a short completion is answered; return the seconds since ``since_s``."""
        while True:
            try:
                if (await self.call("POST", "/v1/completions", json=TINY)).status_code == 200:
                    return time.monotonic() - since_s
            except httpx.HTTPError:
                pass
            assert time.monotonic() - since_s < limit_s, self.server.log.read_text()[-3000:]
            await asyncio.sleep(0.02)

    async def num_blocks_held(self) -> int:
        """Wait until the server is idle; return the blocks that it holds then, and those it had to reclaim."""
        for _ in range(600):
            if not self._metric("vllm:num_requests_running") + self._metric("vllm:num_requests_waiting"):
                break
            await asyncio.sleep(0.05)
        await self.call("POST", "/v1/completions", json=TINY)  # its step publishes the statistics
        await asyncio.sleep(0.3)
        (num_blocks,) = re.findall(r'num_gpu_blocks="(\d+)"', self._metrics())
        held = self._metric("vllm:kv_cache_usage_perc") * int(num_blocks)
        return round(held) + round(self._metric("quire:kv_blocks_reclaimed"))

    def _metrics(self) -> str:
        return httpx.get(self.url + "/metrics", timeout=60).text

    def _metric(self, name: str) -> float:
        found = re.search(
            rf"^{re.escape(name)}(?:_total)?(?:{{[^}}]*}})? (\S+)$", self._metrics(), re.MULTILINE
        )
        assert found, name
        return float(found[1])

    def close(self) -> None:
        """End the server as SIGTERM does."""
        status = self.server.stop()
        text = self.server.log.read_text(errors="replace")
        self._folder.cleanup()
        assert status == 0, text[-3000:]

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.server.stop()
            print(self.server.log.read_text(errors="replace")[-4000:])


def wall_clock_library(folder: Path) -> Path | None:
    """Compile the library that shifts the wall clock; None without a C compiler."""
    if shutil.which("cc") is None or os.uname().sysname != "Linux":
        return None
    made = folder / "wall_clock.so"
    source = Path(__file__).with_name("wall_clock.c")
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", made, source], check=True)
    return made
