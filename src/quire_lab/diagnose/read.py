"""`read`: what a server says of itself over some seconds. No torch, and nothing of the engine.

It takes ``/metrics`` at both ends, ``/engine/live`` between them (``/metrics`` again and again where there is no such
feed), ``/v1/models``, and ``/runtime`` where the address of the admin surface is given.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from quire.errors import ConfigError
from quire.http.client_errors import connection_problem

_POLL_S = 0.5
TIMEOUT_S = 10.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LIVE_KEYS = ("t", "steps", "chunks", "gauges", "limits")
Metrics = dict[str, float]  # name{label=value,…} without model and engine → value

decode = msgspec.json.Decoder().decode


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read."""

    url: str
    seconds: float  # between ``before`` and ``after``
    before: Metrics
    after: Metrics
    live: list[dict[str, Any]] = field(default_factory=list)  # messages of /engine/live
    polled: list[Metrics] = field(default_factory=list)  # where there are none
    runtime: dict[str, Any] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)  # the first model that it lists
    load_per_core: float | None = None  # this machine's, if the server runs on it

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def read(
    url: str,
    seconds: float,
    *,
    key: str | None = None,
    admin_url: str | None = None,
    admin_key: str | None = None,
) -> Reading:
    """Watch the server for ``seconds``.

    Raises:
        ConfigError: there is no server at ``url``, or it is none whose engine can be diagnosed.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url!r} is no address of a server; it looks like http://127.0.0.1:8000.")
    base = parts.geturl().rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    now = asyncio.get_running_loop().time
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=headers, read_bufsize=4 << 20) as session:
            card = await _card(session, base)
            watching = _watch(session, base)
            first = await anext(watching, None)  # sums of what was before are in it
            before, start_s = await _metrics(session, base), now()
            live, polled = [], []
            while (left_s := seconds - (now() - start_s)) > 0:
                if first is None:
                    await asyncio.sleep(min(_POLL_S, left_s))
                    polled.append(await _metrics(session, base))
                    continue
                try:
                    message = await asyncio.wait_for(anext(watching, None), left_s)
                except TimeoutError:
                    break
                if message is None:
                    first = None
                else:
                    live.append({name: message[name] for name in _LIVE_KEYS})
            after, end_s = await _metrics(session, base), now()
            await watching.aclose()
        runtime = {} if admin_url is None else await _runtime(admin_url, admin_key)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigError(f"{base} {connection_problem(error)}") from None
    on_this = parts.hostname in _LOOPBACK
    load = os.getloadavg()[0] / (os.cpu_count() or 1) if on_this else None
    return Reading(base, end_s - start_s, before, after, live, polled, runtime, card, load)


async def _card(session: aiohttp.ClientSession, base: str) -> dict[str, Any]:
    async with session.get(base + "/v1/models") as answer:
        if answer.status == 401:
            raise ConfigError(f"{base} asks for a key: give it as --api-key.")
        models = (decode(await answer.read()) if answer.status == 200 else {}).get("data") or [{}]
        return dict(models[0])


async def _metrics(session: aiohttp.ClientSession, base: str) -> Metrics:
    async with session.get(base + "/metrics") as answer:
        text = await answer.text()
        if answer.status != 200 or "vllm:num_requests_running" not in text:
            raise ConfigError(
                f"{base}/metrics (status {answer.status}) has no metrics of an engine. "
                "Of a gateway, diagnose the replicas, one at a time."
            )
    return parse_metrics(text)


def parse_metrics(text: str) -> Metrics:
    """Return the samples of an exposition by name and labels, without those that all have."""
    metrics: Metrics = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            shown = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            metrics[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return metrics


async def _watch(session: aiohttp.ClientSession, base: str) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the messages of the live feed; none where the server has no such feed, or keeps it from us."""
    async with session.get(base + "/engine/live") as answer:
        if answer.status != 200 or "event-stream" not in answer.content_type:
            return
        rest = b""
        async for piece in answer.content.iter_any():
            *frames, rest = (rest + piece).split(b"\n\n")
            for frame in frames:
                if frame.startswith(b"data: "):
                    yield decode(frame[6:])


async def _runtime(admin_url: str, key: str | None) -> dict[str, Any]:
    socket, _, _ = (
        admin_url.removeprefix("unix:").partition("//") if admin_url.startswith("unix:") else ("", "", "")
    )
    connector = aiohttp.UnixConnector(socket) if socket else None
    base = "http://admin" if socket else admin_url.rstrip("/")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers) as session,
        session.get(base + "/runtime") as answer,
    ):
        body = decode(await answer.read()) if "json" in answer.content_type else {}
        if answer.status != 200:
            error = body.get("error", body)
            message = error.get("message", "") if isinstance(error, dict) else error
            raise ConfigError(f"{admin_url}/runtime answers {answer.status}: {message}")
        return dict(body["runtime"])
