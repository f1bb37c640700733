"""`Discovery`: which backends there are, from the configuration, DNS names and watched files."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from quire.errors import ConfigError
from quire.gateway.config import BackendArgs, checked_url
from quire.gateway.fleet import Source
from quire.gateway.health import Poller
from quire.gateway.state import GatewayState
from quire.metrics.log import Log

log = Log("gateway")


class Discovery:
    """Keeps the fleet as the sources say. A source that cannot be read leaves its backends as they are."""

    def __init__(self, state: GatewayState, poller: Poller) -> None:
        self._state = state
        self._poller = poller
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Add the backends of the configuration and watch the sources that change."""
        for index, args in enumerate(self._state.config.backends):
            if args.url is not None:
                name = args.name or args.url.removeprefix("http://").removeprefix("https://")
                self._state.fleet.add(name if name not in self._state.fleet else f"{name}#{index}", args.url, args,
                                      "config")  # fmt: skip
            else:
                self._tasks.append(asyncio.create_task(self._watch(args)))
        self._poller.sync()

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
            await asyncio.sleep(self._state.config.health.interval_s)

    def _replace(self, args: BackendArgs, known: dict[str, str], urls: Collection[str]) -> dict[str, str]:
        """Make the fleet have exactly ``urls`` of one source; return their names."""
        fleet, source = self._state.fleet, args.name or args.dns or args.file
        kind: Source = "dns" if args.dns is not None else "file"
        wanted = {f"{source}/{url.partition('://')[2]}": url for url in urls}
        for name in known.keys() - wanted.keys():
            fleet.remove(fleet.named(name))
        for name in sorted(wanted.keys() - known.keys()):
            fleet.add(name, wanted[name], args, kind)
        self._poller.sync()
        return wanted


async def _resolve(name: str) -> list[str]:
    """Return a URL for every address of ``host:port``."""
    host, _, port = name.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    addresses = sorted({info[4][0] for info in found})
    return [
        f"http://[{address}]:{port}" if ":" in str(address) else f"http://{address}:{port}"
        for address in addresses
    ]


def _read(path: Path) -> list[str]:
    """Return the URLs of a file: one a line; an empty line or one that begins with ``#`` says nothing."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    urls = [line for line in lines if line and not line.startswith("#")]
    return sorted({checked_url(url, f"{path}: {url!r}") for url in urls})
