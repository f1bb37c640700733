"""What sets the number of replicas: processes of this machine, Kubernetes, Ray, or a webhook.

Each has the replicas that it asked for (`current`, None where it cannot know before the first `scale`) and changes
their number (`scale`), which raises `ScaleError` where that fails; the next look tries again.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import ssl
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from quire.errors import ConfigError, QuireError
from quire.extras import needs
from quire.http.drain import STOP_S
from quire.metrics.log import Log

log = Log("autoscale")
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
_MERGE = "application/merge-patch+json"


class ScaleError(QuireError):
    """The number of replicas could not be read or changed; the message says why."""


class Scaler(Protocol):
    """See the module."""

    async def current(self) -> int | None: ...
    async def scale(self, replicas: int) -> None: ...
    async def close(self) -> None: ...


class LocalPool:
    """Processes of this machine, each a replica that registers itself at the gateway. They end with this one.

    The youngest is ended first, by SIGTERM: a Quire server then drains. One that dies is started again by the next
    `scale`.
    """

    def __init__(self, command: str) -> None:
        self._command = shlex.split(command)
        if not self._command:
            raise ConfigError("--command is empty: it must be the command line of one replica")
        self.processes: list[asyncio.subprocess.Process] = []
        self._ending: list[asyncio.subprocess.Process] = []

    async def current(self) -> int:
        self.processes = [process for process in self.processes if process.returncode is None]
        self._ending = [process for process in self._ending if process.returncode is None]
        return len(self.processes)

    async def scale(self, replicas: int) -> None:
        while await self.current() < replicas:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._command, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                raise ScaleError(f"--command cannot be run: {error}") from error
            self.processes.append(process)
        while len(self.processes) > replicas:
            process = self.processes.pop()
            process.send_signal(signal.SIGTERM)
            self._ending.append(process)

    async def close(self) -> None:
        await self.scale(0)
        waiting = [asyncio.create_task(process.wait()) for process in self._ending]
        if waiting:
            await asyncio.wait(waiting, timeout=STOP_S)
        for process in self._ending:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its helpers, too
        await asyncio.gather(*waiting)


class _Http:
    """Sends JSON; the session is opened by the first request."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | bool = True,
    ) -> Any:  # fmt: skip
        """Return the answer's JSON, None where it has none.

        Raises:
            ScaleError: no answer, or one of 300 or more.
        """
        self._session = self._session or aiohttp.ClientSession(timeout=_TIMEOUT)
        try:
            async with self._session.request(method, url, json=body, headers=headers, ssl=tls) as response:
                if response.status >= 300:
                    text = (await response.text(errors="replace"))[:200]
                    raise ScaleError(f"{method} {url} answered {response.status}: {text}")
                return await response.json(content_type=None) if response.content_length != 0 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ScaleError(f"{method} {url}: {error or type(error).__name__}") from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class Kubernetes:
    """The scale subresource of a Deployment (or StatefulSet), with the token of the pod's service account.

    ``target``: ``deployments/NAME`` or ``statefulsets/NAME``; ``server``: the API server's URL instead of the pod's.
    """

    def __init__(
        self, target: str, namespace: str | None, server: str | None, account: Path = SERVICE_ACCOUNT
    ) -> None:
        kind, _, name = target.partition("/")
        if kind not in ("deployments", "statefulsets") or not name or "/" in name:
            raise ConfigError(f"--target {target!r} must be deployments/NAME or statefulsets/NAME")
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}") for part in ("HOST", "PORT"))
        if server is None and not host:
            raise ConfigError(
                "there is no KUBERNETES_SERVICE_HOST: run in a pod, or give --server (kubectl proxy)"
            )
        at = f"[{host}]" if host and ":" in host else host
        server = (server or f"https://{at}:{port or 443}").rstrip("/")
        file = account / "namespace"
        self._account = account
        namespace = namespace or (file.read_text().strip() if file.is_file() else "default")
        self._url = f"{server}/apis/apps/v1/namespaces/{namespace}/{kind}/{name}/scale"
        authority = account / "ca.crt"
        self._tls = ssl.create_default_context(cafile=str(authority)) if authority.is_file() else True
        self._http = _Http()
        self.close = self._http.close

    async def current(self) -> int:
        answer = await self._http.send("GET", self._url, headers=self._headers(), tls=self._tls)
        try:
            return int(answer["spec"].get("replicas", 0))  # the API leaves a 0 out
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ScaleError(f"{self._url} answered {str(answer)[:200]!r}, which is no Scale") from error

    async def scale(self, replicas: int) -> None:
        headers = {**self._headers(), "content-type": _MERGE}
        await self._http.send(
            "PATCH", self._url, {"spec": {"replicas": replicas}}, headers=headers, tls=self._tls
        )

    def _headers(self) -> dict[str, str]:
        file = self._account / "token"  # read each time: Kubernetes replaces it
        return {"authorization": f"Bearer {file.read_text().strip()}"} if file.is_file() else {}


class Webhook:
    """``POST`` of ``{"replicas": n, "previous": m}`` to a URL; any answer below 300 means that it was taken."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._replicas: int | None = None
        self._http = _Http()
        self.close = self._http.close

    async def current(self) -> int | None:
        return self._replicas

    async def scale(self, replicas: int) -> None:
        body = {"replicas": replicas, "previous": self._replicas}
        await self._http.send("POST", self._url, body, headers=self._headers)
        self._replicas = replicas


class Command:
    """A replica as a process of the node where Ray places its actor."""

    def __init__(self, command: str) -> None:
        self._process = subprocess.Popen(shlex.split(command), stdin=subprocess.DEVNULL)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process and wait until it has drained."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Ray:
    """Ray actors, each of which runs the command on its node. The cluster gives each ``num_cpus`` and ``num_gpus``."""

    def __init__(self, command: str, address: str | None, num_cpus: float, num_gpus: float) -> None:
        with needs("ray", "--executor ray", param="executor"):
            import ray  # type: ignore[import-not-found,unused-ignore]
        self._ray = ray
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        self._actor: Any = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus)(Command)
        self._command = command
        self._actors: list[Any] = []

    async def current(self) -> int:
        alive = []
        for actor in self._actors:
            try:
                if await asyncio.wait_for(actor.is_alive.remote(), STOP_S):
                    alive.append(actor)
            except TimeoutError:  # the cluster has no room for it yet
                alive.append(actor)
            except self._ray.exceptions.RayError as error:
                log.error("replica_died", error=str(error).splitlines()[0])
        self._actors = alive
        return len(alive)

    async def scale(self, replicas: int) -> None:
        while len(self._actors) < replicas:
            self._actors.append(self._actor.remote(self._command))
        while len(self._actors) > replicas:
            actor = self._actors.pop()
            try:
                await asyncio.wait_for(actor.stop.remote(), 2 * STOP_S)
            except (TimeoutError, self._ray.exceptions.RayError) as error:
                log.error("replica_not_ended", error=str(error))
            self._ray.kill(actor)

    async def close(self) -> None:
        await self.scale(0)
