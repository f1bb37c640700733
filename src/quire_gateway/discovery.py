"""`Discovery`: which backends there are: of the configuration, of DNS names and files, and those that register."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from quire.errors import ConfigError, NotFoundError, RequestError, clip
from quire.metrics.log import Log
from quire_gateway.config import BackendArgs, Role
from quire_gateway.config_file import checked_url
from quire_gateway.fleet import Backend, Fleet, Source
from quire_gateway.health import Poller

log = Log("gateway")


@dataclass(frozen=True, slots=True)
class Registration:
    """What a replica says of itself."""

    name: str
    url: str
    models: tuple[str, ...]
    ttl_s: float  # without another heartbeat the replica is gone
    api_key: str | None = None
    max_requests: int | None = None
    region: str | None = None
    role: Role = "both"
    about: Mapping[str, object] = field(default_factory=dict)  # role, fingerprint, version …


class Discovery:
    """Keeps the fleet as the sources say. A source that cannot be read leaves its backends as they are."""

    def __init__(
        self, fleet: Fleet, poller: Poller, sources: Sequence[BackendArgs], now: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._poller = poller
        self._sources = sources
        self._now = now
        self._tasks: list[asyncio.Task[None]] = []
        self._until_s: dict[str, float] = {}  # of registered backends: when they are gone

    def start(self) -> None:
        """Add the backends of the configuration and watch the sources that change."""
        for index, args in enumerate(self._sources):
            if args.url is not None:
                name = args.name or args.url.removeprefix("http://").removeprefix("https://")
                name = name if name not in self._fleet else f"{name}#{index}"
                self._fleet.add(name, args.url, args, "config")
            else:
                self._tasks.append(asyncio.create_task(self._watch(args)))
        self._tasks.append(asyncio.create_task(self._expire()))
        self._poller.sync()

    def register(self, registration: Registration) -> Backend:
        """Take a heartbeat.

        Raises:
            RequestError: the name belongs to a backend that has not registered itself.
        """
        backend = self._fleet.named(registration.name) if registration.name in self._fleet else None
        if backend is not None and backend.source != "registered":
            raise RequestError(
                f"name = {clip(registration.name)} belongs to a backend of the configuration.", param="name"
            )
        if backend is not None and backend.url != registration.url:  # it has started again at another address
            self._fleet.remove(backend)
            backend = None
        if backend is None:
            args = BackendArgs(
                registration.name,
                registration.url,
                models=registration.models,
                api_key=registration.api_key,
                max_requests=registration.max_requests,
                region=registration.region,
                role=registration.role,
            )
            backend = self._fleet.add(registration.name, registration.url, args, "registered")
            self._poller.sync()
        own = backend.args
        if (own.region, own.role) != (registration.region, registration.role):
            backend.args = replace(own, region=registration.region, role=registration.role)
        self._fleet.serves(backend, registration.models)
        backend.about = dict(registration.about)
        self._until_s[registration.name] = self._now() + registration.ttl_s
        return backend

    def deregister(self, name: str) -> None:
        """A replica says that it ends.

        Raises:
            NotFoundError: no backend of this name has registered itself.
        """
        backend = self._fleet.named(name)
        if self._until_s.pop(name, None) is None:
            raise NotFoundError(f"The backend {clip(name)} has not registered itself.", code="not_registered")
        self._fleet.remove(backend)
        self._poller.sync()

    async def _expire(self) -> None:
        """Remove the replicas whose heartbeats have stopped."""
        while True:
            await asyncio.sleep(self._fleet.health.interval_s / 2)
            for name in [name for name, until_s in self._until_s.items() if until_s < self._now()]:
                log.warning("backend_silent", backend=name)
                self.deregister(name)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task

    async def _watch(self, args: BackendArgs) -> None:
        known: dict[str, str] = {}  # name → URL
        failure = ""
        while True:
            try:
                urls = await _resolve(args.dns) if args.dns is not None else _read(Path(str(args.file)))
            except (OSError, ConfigError, UnicodeDecodeError) as error:
                if str(error) != failure:
                    failure = str(error)
                    log.error("discovery_failed", source=args.dns or args.file, error=failure)
            else:
                failure = ""
                known = self._replace(args, known, urls)
            await asyncio.sleep(self._fleet.health.interval_s)

    def _replace(self, args: BackendArgs, known: dict[str, str], urls: Collection[str]) -> dict[str, str]:
        """Make the fleet have exactly ``urls`` of one source; return their names."""
        fleet, source = self._fleet, args.name or args.dns or args.file
        kind: Source = "dns" if args.dns is not None else "file"
        named_urls = {f"{source}/{url.partition('://')[2]}": url for url in urls}
        for name in known.keys() - named_urls.keys():
            fleet.remove(fleet.named(name))
        for name in sorted(named_urls.keys() - known.keys()):
            fleet.add(name, named_urls[name], args, kind)
        self._poller.sync()
        return named_urls


async def _resolve(name: str) -> list[str]:
    """Return a URL for every address of ``host:port``."""
    host, _, port = name.rpartition(":")
    infos = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    addresses = sorted({info[4][0] for info in infos})
    return [
        f"http://[{address}]:{port}" if ":" in str(address) else f"http://{address}:{port}"
        for address in addresses
    ]


def _read(path: Path) -> list[str]:
    """Return the URLs of a file: one a line; an empty line or one that begins with ``#`` says nothing."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    urls = [line for line in lines if line and not line.startswith("#")]
    return sorted({checked_url(url, f"{path}: {url!r}") for url in urls})
