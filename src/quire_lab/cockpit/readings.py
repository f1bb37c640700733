"""`Readings`: what the messages of ``/engine/live`` say in figures: rates, latencies against the SLO, failures.

The browser draws; everything that is computed over several messages is computed here, where it is tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from quire_lab.cockpit.figures import Tile, count, percent, seconds, size

MIN_S = 0.1  # a shorter interval is counted to the next one
RATE_S = 2.0  # the tiles show the mean of so much time
WINDOW_S = 60.0  # latencies and failures are judged by the last minute
TITLES = {"ttft": "Time to first token", "itl": "Inter-token latency", "tpot": "Time per output token"}
LIMITS = {"ttft": "ttft", "tpot": "tpot"}  # the SLO bounds the mean gap of a request, not each gap
STEP_PARTS = ("plan_s", "compute_s", "draft_s", "apply_s")


class Message(msgspec.Struct, frozen=True):
    """What is read of one message (see `quire.scheduler.live` and `quire.api.live_feed`)."""

    t: float
    since: float
    gauges: dict[str, Any]
    steps: dict[str, float]
    limits: dict[str, Any]
    model: dict[str, Any]
    latency: dict[str, dict[str, Any]]
    answers: list[tuple[str, str, int]]
    restarts: int | None = None
    memory_bytes: int | None = None


_decode = msgspec.json.Decoder(Message).decode


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """Return the value below which a share ``q`` of the counted observations lies, as Prometheus interpolates it."""
    total, seen = sum(counts), 0
    if not total:
        return None
    for i, num in enumerate(counts):
        if num and seen + num >= q * total:
            if i >= len(bounds):
                return bounds[-1]
            low = bounds[i - 1] if i else 0.0
            return low + (bounds[i] - low) * (q * total - seen) / num
        seen += num
    return bounds[-1]


class Readings:
    """The figures of one engine, from its messages in their order."""

    def __init__(self) -> None:
        self._restarts: int | None = None  # engine restarts when the page was opened
        self._restart()

    def _restart(self) -> None:
        self._first: Message | None = None
        self._last: Message | None = None
        self._from: Message | None = None  # since which time the next point counts
        self._steps: dict[str, float] = {}  # sums since then
        self._points: deque[dict[str, Any]] = deque()  # points within `RATE_S`
        self._minute: deque[Message] = deque()  # one message per second, within `WINDOW_S`
        self._drafting = False

    def take(self, text: str) -> dict[str, Any]:
        """Return what the browser draws beside the message itself.

        ``point`` is None where the interval since the point before is too short for a rate, and after a pause.
        """
        message = _decode(text)
        last = self._last
        is_new = last is not None and (
            message.t < last.t
            or message.gauges["num_generated_tokens"] < last.gauges["num_generated_tokens"]
            or (message.restarts or 0) > (last.restarts or 0)
        )
        if is_new:
            self._restart()
        self._first = self._first or message
        self._restarts = message.restarts if self._restarts is None else self._restarts
        self._last = message
        self._drafting = self._drafting or message.gauges["num_draft_tokens"] > 0
        if not self._minute or message.t - self._minute[-1].t >= 1.0:
            self._minute.append(message)
            while message.t - self._minute[0].t > WINDOW_S:
                self._minute.popleft()
        point = self._point(message)
        return {
            "is_new": is_new,
            "point": point,
            "tiles": [tile.as_dict() for tile in self._tiles()],
            "latency": {key: self._latency(key) for key in TITLES},
            "drafting": self._drafting,
        }

    def _point(self, message: Message) -> dict[str, Any] | None:
        begin, steps = self._from, message.steps
        if begin is None or message.since - begin.t > MIN_S:  # the engine was not asked meanwhile
            self._from, self._steps = message, {}
            return None
        self._steps = {name: self._steps.get(name, 0.0) + value for name, value in steps.items()}
        passed_s = message.t - begin.t
        if passed_s < MIN_S:
            return None
        made = message.gauges["num_generated_tokens"] - begin.gauges["num_generated_tokens"]
        point = {
            "t": message.t,
            "seconds": passed_s,
            "made": made / passed_s,
            "prompt": self._steps.get("prompt_tokens", 0.0) / passed_s,
            "running": message.gauges["num_running"],
            "waiting": message.gauges["num_waiting"],
            "steps": self._steps,
        }
        self._from, self._steps = message, {}
        self._points.append(point)
        while message.t - self._points[0]["t"] >= RATE_S:
            self._points.popleft()
        return point

    def _mean(self, name: str) -> float | None:
        passed_s = sum(point["seconds"] for point in self._points)
        if not passed_s:
            return None
        return float(sum(point[name] * point["seconds"] for point in self._points) / passed_s)

    def _tiles(self) -> list[Tile]:
        assert self._first is not None
        assert self._last is not None
        now, g, first = self._last, self._last.gauges, self._first.gauges
        num_steps = sum(point["steps"].get("count", 0.0) for point in self._points)
        used_s = sum(point["steps"].get(part, 0.0) for point in self._points for part in STEP_PARTS)
        num_used = g["num_blocks"] - g["num_free_blocks"] - g["num_idle_blocks"]
        num_prompt = g["num_prompt_tokens"] - first["num_prompt_tokens"]
        hit = g["num_cached_tokens"] - first["num_cached_tokens"]
        tiles = [
            Tile("generated tokens/s", count(self._mean("made"))),
            Tile("prompt tokens/s", count(self._mean("prompt"))),
            Tile(f"running of {now.limits['max_num_seqs']}", count(g["num_running"])),
            Tile("waiting", count(g["num_waiting"])),
            Tile("KV blocks in use", percent(num_used, g["num_blocks"])),
            Tile("of prompts cached", percent(hit, num_prompt))
            if num_prompt
            else Tile(
                "of prompts cached, since start", percent(g["num_cached_tokens"], g["num_prompt_tokens"])
            ),
            Tile("a step", seconds(used_s / num_steps if num_steps else None)),
            self._failures(),
        ]
        if now.restarts is not None:
            tiles.append(Tile("engine restarts", count(now.restarts), now.restarts > (self._restarts or 0)))
        if now.memory_bytes:
            tiles.append(Tile("memory, all processes", size(now.memory_bytes)))
        return tiles + self._rare_tiles(g, first)

    def _rare_tiles(self, g: dict[str, Any], first: dict[str, Any]) -> list[Tile]:
        """Return the tiles of what most servers do not have, or have not done."""
        tiles = []
        if self._drafting:
            tried = g["num_draft_tokens"] - first["num_draft_tokens"]
            accepted = g["num_accepted_tokens"] - first["num_accepted_tokens"]
            share = (
                percent(accepted, tried)
                if tried
                else percent(g["num_accepted_tokens"], g["num_draft_tokens"])
            )
            tiles.append(Tile("drafts accepted", share))
        for name, title in (("num_preemptions", "preemptions"), ("num_refused", "refused by the scheduler")):
            if g[name]:
                tiles.append(Tile(title, count(g[name]), g[name] > first[name]))
        if g["num_loaded_blocks"] + g["num_stored_blocks"]:
            tiles.append(
                Tile(
                    "blocks from / to tiers",
                    f"{count(g['num_loaded_blocks'])} / {count(g['num_stored_blocks'])}",
                )
            )
        return tiles

    def _failures(self) -> Tile:
        """Return the share of answers that failed: 5xx, or streams that began as 200 and whose sequence failed."""
        assert self._last is not None
        old, new = self._minute[0], self._last
        before = {(path, status): num for path, status, num in old.answers}
        since = [(status, num - before.get((path, status), 0)) for path, status, num in new.answers]
        total = sum(num for _, num in since)
        failed = max(
            sum(num for status, num in since if status.startswith("5")),
            new.gauges["num_failed"] - old.gauges["num_failed"],
        )
        total = max(total, failed)
        return Tile(
            f"failed of {count(total)}, last minute", percent(failed, total) if total else "0 %", failed > 0
        )

    def _latency(self, key: str) -> dict[str, Any]:
        """Return quantiles of the last minute; where there was no request in it, since the page was opened, or ever."""
        assert self._first is not None
        assert self._last is not None
        now = self._last.latency[key]
        counts, when = list(now["counts"]), "since the server started"
        for base, title in ((self._minute[0], "last minute"), (self._first, "since this page was opened")):
            old = base.latency[key]["counts"]
            if old != now["counts"]:
                counts, when = [n - before for n, before in zip(counts, old, strict=True)], title
                break
        p50, p90, p99 = (quantile(now["bounds"], counts, q) for q in (0.5, 0.9, 0.99))
        limit = self._last.model.get("slo", {}).get(LIMITS.get(key, ""))
        is_over = limit is not None and p99 is not None and p99 > limit
        text = "no request yet"
        if p99 is not None:
            text = f"p50 {seconds(p50)} · p90 {seconds(p90)} · p99 {seconds(p99)} · {when}"
            if limit is not None:
                text += f" · SLO {seconds(limit)}" + (": exceeded" if is_over else "")
        return {"counts": counts, "p50": p50, "p99": p99, "slo": limit, "is_over": is_over, "said": text}
