"""`LiveFeed`: what the engine does now, as server-sent events (``GET /engine/live``), for pages that watch it.

Each event is a JSON object: the reply to `TakeLive` (see `quire.scheduler.live`; ``blocks`` is base64) with what this
process knows beside it:

    model      served names, context, block size, SLO
    latency    of TTFT, ITL and TPOT: {bounds, counts} since the start, in seconds
    answers    [path, status, count]
    restarts, memory_bytes    of the engine; of all processes of the server

The engine is asked a few times a second, only while a reader listens, and less often where a reply takes it long: the
replies take at most `MAX_SHARE` of its time. All readers get the same bytes.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire.api.state import ApiState
from quire.clock import BEAT_S
from quire.engine.messages import TakeLive
from quire.errors import QuireError
from quire.http.call import call_of
from quire.http.memory import family_bytes
from quire.http.refusals import HttpError, Refusal

LIVE_PATH = "/engine/live"
EVERY_S = 0.25
MAX_SHARE = 0.01
# Messages of a reader that is slow; beyond them the oldest ones are dropped.
_MAX_WAITING = int(BEAT_S / EVERY_S)
_HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
}
_encode = msgspec.json.Encoder().encode


class LiveFeed:
    """The readers of one engine's activity."""

    def __init__(self, state: ApiState) -> None:
        self._state = state
        self._readers: set[asyncio.Queue[bytes]] = set()
        self._task: asyncio.Task[None] | None = None
        self._memory_bytes, self._measure_s = 0, 0.0  # when it is due next

    async def show(self, request: Request) -> Response:
        """The stream. It has the requests of all tenants: where there are several, it is for operators.

        Raises:
            HttpError: 403, for a key of one of several tenants.
        """
        key, file = call_of(request.scope).key, self._state.settings.key_file
        if key is not None and not key.admin and file is not None and len(file.table().groups) > 1:
            text = f"{LIVE_PATH} shows the requests of all tenants: it takes a key of --api-key or with scope=admin."
            raise HttpError(Refusal(403, text, code="forbidden"))
        return StreamingResponse(
            self._messages(), media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )

    async def _messages(self) -> AsyncGenerator[bytes, None]:
        queue: asyncio.Queue[bytes] = asyncio.Queue(_MAX_WAITING)
        self._readers.add(queue)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            while queue in self._readers or not queue.empty():
                try:
                    yield b"data: %b\n\n" % await asyncio.wait_for(queue.get(), BEAT_S)
                except TimeoutError:
                    yield b": the engine does not answer\n\n"
        finally:
            self._readers.discard(queue)

    async def _poll(self) -> None:
        """Ask the engine until no reader is left, or the server ends."""
        frontend = self._state.frontend
        while self._readers and frontend.state in ("starting", "ready"):
            pause_s = EVERY_S
            try:
                values = (await frontend.call(TakeLive)).values
            except QuireError:  # it starts, or starts again
                pass
            else:
                pause_s = max(pause_s, values["cost_s"] / MAX_SHARE)
                self._tell(_encode(values | self._beside(values)))
            await asyncio.sleep(pause_s)
        self._readers.clear()

    def _beside(self, values: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        histograms = {key: state.metrics.histograms[name] for key, name in _HISTOGRAMS.items()}
        slo = state.forecast.slo if state.forecast is not None else None
        return {
            "blocks": base64.b64encode(values["blocks"]).decode(),
            "model": {
                "names": state.model.names,
                "context": state.model.max_model_len,
                "slo": {} if slo is None else {"ttft": slo.ttft_s, "tpot": slo.tpot_s},
            },
            "latency": {
                key: {"bounds": histogram.bounds, "counts": histogram.counts}
                for key, histogram in histograms.items()
            },
            "restarts": state.frontend.health().num_restarts,
            "memory_bytes": self._memory(),
            "answers": [(path, status, count) for (path, status), count in state.metrics.responses.items()],
        }

    def _memory(self) -> int:
        """Return what the server's processes have in memory, as of a moment ago: asking takes a millisecond."""
        if (now := self._state.now()) >= self._measure_s:
            self._memory_bytes, self._measure_s = family_bytes(), now + BEAT_S
        return self._memory_bytes

    def _tell(self, message: bytes) -> None:
        for queue in self._readers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(message)
