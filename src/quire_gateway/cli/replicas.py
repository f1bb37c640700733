"""`quire serve --replicas N`: N servers as child processes, and a gateway in this one. Cores are shared out."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from quire.args import EngineArgs, ServerArgs, comma_list, flag_name
from quire.cli.clients import guide, model_names
from quire.cores import core_groups
from quire.engine.restarts import Restarts
from quire.engine.supervisor import RestartPolicy
from quire.errors import ConfigError
from quire.executor.child_process import child_environment
from quire.http.drain import STOP_S
from quire.metrics.log import Log, configure
from quire_gateway.cli.gateway import batches
from quire_gateway.config import GatewayArgs, GatewayConfig
from quire_gateway.server import Beside, run_gateway
from quire_gateway.state import GatewayState

# Settings that belong to one server. The gateway has its own, or would have to have them.
REFUSED = (
    "admin_port", "admin_socket", "gateway", "gateway_key", "region", "handover",
    "journal", "step_log", "tls_cert", "tls_key", "record_requests", "compare_to", "cockpit",
    "check", "max_kl",
)  # fmt: skip
OWN = (
    "replicas",
    "data_parallel_size",
    "host",
    "port",
    "api_key",
    "api_key_file",
    "admin_key",
    "cors_origins",
    "allowed_hosts",
    "clients",
    "batch_dir",
    "max_file_mib",
)
MEMORY = ("kv_memory", "num_kv_blocks", "gpu_memory_utilization", "gpu_memory")
_MEMORY_SHARE = 0.8  # of what is available, for all replicas together
_LAST_LINES_S = 1.0
_PR_SET_PDEATHSIG = 1
log = Log("gateway")


def serve_replicas(settings: dict[str, Any], args: ServerArgs, num: int) -> int:
    """Run until a signal; return the exit status: 1 when a replica could not start.

    Raises:
        ConfigError: a setting that several replicas cannot have.
    """
    for name in REFUSED:
        if settings.get(name) not in (None, False):
            raise ConfigError(
                f"{flag_name(name)} is a setting of one server and not allowed with --replicas {num}: leave it out, "
                "or start the replicas and `quire gateway` yourself (docs/gateway.md)."
            )
    style: Any = args.log_format
    configure(args.log_level, style=style)
    key = args.admin_key or secrets.token_hex(16)
    shared = {name: value for name, value in settings.items() if name not in OWN and value is not None}
    if not any(name in shared for name in MEMORY):
        shared["gpu_memory_utilization"] = round(_MEMORY_SHARE / num, 4)
    shared |= {"host": "127.0.0.1", "port": 0, "api_key": key, "gateway_key": key}
    model = str(settings.get("model", EngineArgs().model))
    replicas = Replicas(shared, core_groups(num), args.max_restarts)
    status = run_gateway(
        GatewayConfig(server=gateway_args(args, key)),
        beside=guided(replicas.running, args, (comma_list(args.served_model_name) or (model,))[0]),
        extend=batches,
    )
    return status or replicas.status


def gateway_args(args: ServerArgs, admin_key: str) -> GatewayArgs:
    """Return the settings of the gateway in front of servers of this machine; it checks the clients' keys."""
    return GatewayArgs(
        args.host,
        args.port,
        api_keys=(args.api_key,) if args.api_key else (),
        key_file=args.api_key_file,
        admin_key=admin_key,
        max_body_mib=args.max_body_mib,
        batch_dir=args.batch_dir,
        max_file_mib=args.max_file_mib,
        drain_timeout_s=args.drain_timeout_s,
        cors_origins=comma_list(args.cors_origins),
        allowed_hosts=comma_list(args.allowed_hosts),
        stand_ins=model_names(args.clients),
    )


def guided(beside: Beside, args: ServerArgs, model: str) -> Beside:
    """Return ``beside`` that first prints the lines of ``--for``, with the gateway's address."""

    @asynccontextmanager
    async def running(state: GatewayState, url: str, stop: Callable[[], None]) -> AsyncGenerator[None, None]:
        print(guide(args, url, model), file=sys.stderr, flush=True)
        async with beside(state, url, stop):
            yield

    return running if args.clients else beside


Start = Callable[[Path, set[int]], Awaitable[asyncio.subprocess.Process]]


class Replicas:
    """The child processes. One that dies is started again, later each time, for as long as another one is there.

    `max_restarts` holds where none is: for the last replica that dies, and for those that die before any has served.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        cores: Sequence[set[int]],
        max_restarts: int,
        now: Callable[[], float] = time.monotonic,
        start: Start | None = None,
    ) -> None:
        self._settings = settings
        self._cores = cores
        self._max_restarts = max_restarts
        self._now = now
        self._start = start or start_server
        self._stopping = asyncio.Event()
        self._has_served = False  # any of them
        self._children: dict[int, asyncio.subprocess.Process] = {}
        self.status = 0

    @asynccontextmanager
    async def running(
        self, state: GatewayState, url: str, stop: Callable[[], None]
    ) -> AsyncGenerator[None, None]:
        """Run them while the block does. They register at ``url``; ``stop`` ends the gateway."""
        with tempfile.TemporaryDirectory(prefix="quire-") as folder:
            path = Path(folder) / "serve.toml"  # the folder is this user's alone: the file has keys
            record_all(lambda: self._children.values())
            path.write_text(as_toml(self._settings | {"gateway": url}))
            tasks = [
                asyncio.create_task(self._keep(index, path, state, stop)) for index in range(len(self._cores))
            ]
            try:
                yield
            finally:
                self._stopping.set()
                for child in self._children.values():
                    with suppress(ProcessLookupError):
                        child.terminate()
                _, late = await asyncio.wait(tasks, timeout=STOP_S)
                for child in self._children.values() if late else ():
                    with suppress(ProcessLookupError):
                        child.kill()
                await asyncio.gather(*tasks)

    async def _keep(self, index: int, path: Path, state: GatewayState, stop: Callable[[], None]) -> None:
        """Start one replica again and again until the server ends."""
        policy = RestartPolicy()
        restarts = Restarts(policy.window_s, policy.backoff_s, policy.max_backoff_s)
        while not self._stopping.is_set():
            begin_s = self._now()
            child = self._children[index] = await self._start(path, self._cores[index])
            lines = asyncio.create_task(_copy_lines(child, index))
            status = await child.wait()
            del self._children[index]
            self._take_off(child.pid, state)
            await asyncio.wait(
                [lines], timeout=_LAST_LINES_S
            )  # its own children may have the pipe a while longer
            lines.cancel()
            if self._stopping.is_set():
                return
            now_s = self._now()
            if not self._may_restart(restarts.count(now_s), state):
                log.error("replica_died", replica=index, status=status, seconds=round(now_s - begin_s, 1))
                self.status = 1
                stop()
                return
            restarts.add(now_s)
            pause_s = restarts.pause_s(now_s)
            log.error("replica_died", replica=index, status=status, seconds=round(now_s - begin_s, 1),
                      restart_in_s=pause_s)  # fmt: skip
            await self._pause(pause_s)

    def _may_restart(self, num_restarts: int, state: GatewayState) -> bool:
        """Whether a replica that has died is started again."""
        is_served = any(backend.is_ready for backend in state.fleet)
        self._has_served |= is_served
        if is_served or (self._has_served and self._children):
            return True
        return num_restarts < self._max_restarts and (self._has_served or bool(self._children))

    def _take_off(self, pid: int, state: GatewayState) -> None:
        """Send nothing more to a replica that has died."""
        for backend in state.fleet:
            if backend.about.get("pid") == pid:
                self._has_served = True
                state.discovery.deregister(backend.name)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


def record_all(children: Callable[[], Iterable[asyncio.subprocess.Process]]) -> None:
    """Have ``SIGUSR2`` save a recording of each of these servers."""

    def pass_on() -> None:
        for child in children():
            with suppress(ProcessLookupError):
                child.send_signal(signal.SIGUSR2)

    if threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, pass_on)


async def start_server(config: Path, cores: set[int]) -> asyncio.subprocess.Process:
    """Start ``quire serve --config``. On Linux it is bound to its cores, and ends with this process in any case."""

    def in_child() -> None:
        if sys.platform == "linux":
            os.sched_setaffinity(0, cores)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "quire.cli", "serve", "--config", str(config),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=child_environment(),
        start_new_session=True,  # a terminal's Ctrl-C is for the gateway, which drains first
        preexec_fn=in_child,
    )  # fmt: skip


async def _copy_lines(child: asyncio.subprocess.Process, index: int) -> None:
    """Write the replica's output on stderr, each line behind its number."""
    assert child.stdout is not None
    while line := await child.stdout.readline():
        sys.stderr.write(f"[{index}] {line.decode(errors='replace')}")
        sys.stderr.flush()


def as_toml(settings: dict[str, Any]) -> str:
    """Return settings as TOML; JSON's strings, numbers, truth values and lists of strings are TOML's."""
    return "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in settings.items())
