"""`quire serve A B --model-memory 12GiB`: a server per model, started on demand behind a gateway in this process."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.args import EngineArgs, ServerArgs, flag_name
from quire.cli.flags import ON_DEMAND, pick
from quire.clock import LOOK_S
from quire.config import DeviceInfo
from quire.cores import usable_cpus
from quire.cost.split import GRAPH_BYTES, RUNTIME_BYTES
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.errors import ConfigError, ModelLoadError, nearest
from quire.http.drain import STOP_S
from quire.metrics.log import configure as configure_log
from quire.resolve import blocks_for_sequence, parse_bytes, step_bytes
from quire.units import GIB
from quire_gateway.cli.gateway import batches
from quire_gateway.cli.replicas import (
    MEMORY,
    OWN,
    REFUSED,
    as_toml,
    gateway_args,
    guided,
    record_all,
    start_server,
)
from quire_gateway.config import GatewayConfig
from quire_gateway.fleet import Backend
from quire_gateway.model_pool import ModelPool, PooledModel
from quire_gateway.server import run_gateway
from quire_gateway.state import GatewayState

# Settings that belong to one model, and those of `quire serve --replicas`.
_OF_ONE = (
    "served_model_name",
    "chat_template",
    "tokenizer",
    "revision",
    "lora",
    "draft_model",
    "num_kv_blocks",
)
_POOL = (*ON_DEMAND, "model", "admin_key")
_KEPT_LINES = 20  # of a server's output, for the error of a load that failed


@dataclass(frozen=True, slots=True)
class Share:
    """The memory of one model."""

    fixed_bytes: int  # weights, the largest step and the process
    kv_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes


def serve_models(settings: dict[str, Any], models: list[str], args: ServerArgs) -> int:
    """Run until a signal; return the exit status.

    Raises:
        ConfigError: a setting that several models cannot have, or a model that does not fit.
        ModelLoadError, UnsupportedModelError: a model cannot be found, read or run.
    """
    paths = named_models(models)
    refused = (*REFUSED, *_OF_ONE, "replicas", "data_parallel_size")
    for name in refused:
        if settings.get(name) not in (None, False, (), []):
            raise ConfigError(
                f"{flag_name(name)} is a setting of one server and not allowed with several models or --model-memory: "
                "leave it out, or start the servers and `quire gateway` yourself (docs/gateway.md)."
            )
    for name in args.pin:
        if name not in paths:
            raise ConfigError(
                f"--pin {name!r} is none of the models {', '.join(paths)}{nearest(name, paths)}"
            )
    style: Any = args.log_format
    configure_log(args.log_level, style=style)
    memory, shares = memory_shares(paths, settings, args)
    shared = {k: v for k, v in settings.items() if k not in (*OWN, *MEMORY, *_POOL) and v is not None}
    key = args.admin_key or secrets.token_hex(16)
    shared |= {"host": "127.0.0.1", "port": 0, "api_key": secrets.token_hex(16), "gateway_key": key}
    servers = ModelServers(
        {
            name: shared | {"model": path, "served_model_name": name, "kv_memory": shares[name].kv_bytes}
            for name, path in paths.items()
        }
    )
    pool = ModelPool(
        [PooledModel(n, s.num_bytes, n in args.pin, args.keep_alive_s) for n, s in shares.items()],
        memory, servers.load, servers.unload, time.monotonic, load_timeout_s=args.load_timeout_s,
    )  # fmt: skip
    servers.on_death = pool.died
    pool.keys = (args.admin_key,) if args.admin_key else ()
    pool.is_closed = pool.keys == () and (args.api_key is not None or args.api_key_file is not None)
    print(report(shares, memory, args.pin), file=sys.stderr, flush=True)
    first = next(iter(paths))
    server = replace(gateway_args(args, key), default_model=first if args.clients else None)
    beside = guided(servers.running, args, first)
    return run_gateway(GatewayConfig(server=server), beside=beside, extend=batches, pool=pool)


def named_models(models: list[str]) -> dict[str, str]:
    """Return name → path, folder or hub id of ``NAME=MODEL`` or ``MODEL``, which is its own name.

    Raises:
        ConfigError: two models have one name, or a name is empty or has a comma.
    """
    paths: dict[str, str] = {}
    for text in models:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name = path = text
        if not name or not path or "," in name:
            raise ConfigError(f"model {text!r} must be a model, or NAME=MODEL with a name that has no comma")
        if name in paths:
            raise ConfigError(f"two models are named {name!r}: give one another name, as in other={path}")
        paths[name] = path
    return paths


def memory_shares(
    paths: Mapping[str, str], settings: Mapping[str, Any], args: ServerArgs, device: DeviceInfo | None = None
) -> tuple[int, dict[str, Share]]:
    """Return the memory of all models together, and each one's share.

    Without ``kv_memory`` the models share what all their weights leave, but each gets at least one request of its full
    length, or half of what its own weights leave if that is less.

    Raises:
        ConfigError: a model does not fit, or the pinned models leave no room for another one.
    """
    device = device or detect_device(settings.get("device") or "auto")
    memory = parse_bytes(args.model_memory, name="model_memory") if args.model_memory is not None else 0
    memory = memory or device.memory_available_bytes * 4 // 5
    needs = {
        name: _needs(pick(EngineArgs, {**settings, "model": path}), device) for name, path in paths.items()
    }
    kv_memory, shares = settings.get("kv_memory"), {}
    even = (memory - sum(fixed for fixed, _, _ in needs.values())) // len(needs)
    for name, (fixed, least, most) in needs.items():
        kv = min(max(even, min(least, (memory - fixed) // 2)), most)
        shares[name] = Share(fixed, parse_bytes(kv_memory) if kv_memory is not None else kv)
        if shares[name].num_bytes > memory or shares[name].kv_bytes <= 0:
            raise ConfigError(
                f"model_memory = {memory / GIB:.2f} GiB does not hold {name!r}: {fixed / GIB:.2f} GiB of weights, "
                f"largest step and process, and {max(0, shares[name].kv_bytes) / GIB:.2f} GiB of KV cache"
            )
    pinned = sum(shares[name].num_bytes for name in args.pin)
    largest = max((s.num_bytes for n, s in shares.items() if n not in args.pin), default=0)
    if pinned + largest > memory:
        raise ConfigError(
            f"model_memory = {memory / GIB:.2f} GiB is too little: the pinned models take {pinned / GIB:.2f} GiB and "
            f"the largest other one {largest / GIB:.2f} GiB; raise it, lower --kv-memory, or pin fewer"
        )
    return memory, shares


def _needs(args: EngineArgs, device: DeviceInfo) -> tuple[int, int, int]:
    """Return a model's bytes beside its KV cache, and the KV cache of one request and of ``max_num_seqs``."""
    config, _ = configure(replace(args, kv_memory=None, num_kv_blocks=1 << 40), device)
    spec, length = config.model.spec, config.model.max_model_len
    page = config.kv_layout.block_bytes(config.cache.block_size, config.model.kv_dtype)
    one = page * blocks_for_sequence(spec, length, config.cache.block_size, args.max_num_batched_tokens)
    kind = "cpu" if device.kind == "cpu" else "accelerator"
    fixed = spec.weight_bytes(config.model.dtype, config.model.formats) + step_bytes(args, spec)
    return fixed + RUNTIME_BYTES[kind] + GRAPH_BYTES[kind], one, one * args.max_num_seqs


def report(shares: Mapping[str, Share], memory: int, pinned: tuple[str, ...]) -> str:
    """Return the lines that the start prints: each model's memory."""
    lines = [
        f"model    {name}: {s.num_bytes / GIB:.2f} GiB, of which {s.kv_bytes / GIB:.2f} GiB KV cache"
        f"{', pinned' if name in pinned else ''}"
        for name, s in shares.items()
    ]
    together = sum(s.num_bytes for s in shares.values())
    lines.append(f"memory   {memory / GIB:.2f} GiB for models; all together take {together / GIB:.2f} GiB")
    return "\n".join(lines)


class ModelServers:
    """The child processes, by model. They register at the gateway, which tells when one can take requests."""

    def __init__(self, settings: Mapping[str, dict[str, Any]]) -> None:
        self._settings = settings
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._lines: dict[str, deque[str]] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._state: GatewayState | None = None
        self._folder = Path()
        self.on_death: Callable[[str], None] = lambda name: None

    @asynccontextmanager
    async def running(
        self, state: GatewayState, url: str, stop: Callable[[], None]
    ) -> AsyncGenerator[None, None]:
        """Have the gateway load and unload models while the block runs."""
        with tempfile.TemporaryDirectory(prefix="quire-") as folder:
            self._state, self._folder = (
                state,
                Path(folder),
            )  # the folder is this user's alone: the files have keys
            for index, settings in enumerate(self._settings.values()):
                (self._folder / f"{index}.toml").write_text(as_toml(settings | {"gateway": url}))
            assert state.pool is not None
            record_all(lambda: self._children.values())
            try:
                yield
            finally:
                await state.pool.close()
                await asyncio.gather(*(self.unload(name) for name in list(self._children)))

    async def load(self, name: str) -> None:
        """Start a model's server and wait until it takes requests.

        Raises:
            ModelLoadError: it ended instead; with the last line that it wrote.
        """
        path = self._folder / f"{list(self._settings).index(name)}.toml"
        child = await start_server(path, usable_cpus())
        self._children[name], self._lines[name] = child, deque(maxlen=_KEPT_LINES)
        self._watching[name] = watching = asyncio.create_task(self._watch(name, child))
        try:
            while not any(b.is_ready for b in self._backends(child)):
                if watching.done():
                    errors = [line for line in self._lines[name] if line.startswith("quire: ")]
                    raise ModelLoadError((errors or [f"its server ended with status {child.returncode}"])[-1])
                await asyncio.sleep(LOOK_S)
        except BaseException:
            await self.unload(name)
            raise

    async def unload(self, name: str) -> None:
        """End a model's server. Its requests have ended."""
        child = self._children.pop(name, None)
        if child is None:
            return
        for backend in self._backends(child):
            backend.is_draining = True
        with suppress(ProcessLookupError):
            child.terminate()
        _, late = await asyncio.wait([self._watching.pop(name)], timeout=STOP_S)
        if late:
            with suppress(ProcessLookupError):
                child.kill()
            await asyncio.wait(late)

    def _backends(self, child: asyncio.subprocess.Process) -> list[Backend]:
        assert self._state is not None
        return [b for b in self._state.fleet if b.about.get("pid") == child.pid]

    async def _watch(self, name: str, child: asyncio.subprocess.Process) -> None:
        """Copy the server's output to stderr until it ends, and take it off the gateway then."""
        assert child.stdout is not None
        while data := await child.stdout.readline():
            line = data.decode(errors="replace")
            self._lines[name].append(line.rstrip())
            sys.stderr.write(f"[{name}] {line}")
            sys.stderr.flush()
        await child.wait()
        assert self._state is not None
        for backend in self._backends(child):
            self._state.discovery.deregister(backend.name)
        if self._children.get(name) is child:
            del self._children[name]
            del self._watching[name]
            self.on_death(name)
