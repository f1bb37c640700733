"""`RedisStore`: blocks in a Redis or Valkey server that the engines of several machines share.

    quire:kv:ROOT:KEY      header and payload of a block, for ``ttl_s`` seconds after it was written
    quire:kv:ROOT:index    a sorted set of the keys, by the server's time at which each was written

Which keys there are is learned once per second, so `contains` asks no server. The server's own bound and policy
(``maxmemory``, ``maxmemory-policy allkeys-lru``) decide what goes first. Whatever the server does, a call ends within a
few timeouts, and after a failure nothing is asked of it for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from quire.clock import Clock, WallClock
from quire.extras import needs
from quire.metrics.log import Log
from quire.tiers.record import HEADER_BYTES, header_of, is_whole, short_root
from quire.tiers.spans import SPAN_BYTES
from quire.tiers.store import StoreCounts

log = Log("kv-remote")


class RedisStore:
    """The store of one root in the server at ``url``."""

    name = "redis"

    def __init__(
        self,
        url: str,
        root: str,
        *,
        password: str | None = None,
        ttl_s: int = 86_400,
        timeout_s: float = 0.5,
        pause_s: float = 5.0,
        refresh_s: float | None = 1.0,
        clock: Clock | None = None,
    ) -> None:
        """``timeout_s``: of connecting and of each answer. ``pause_s``: without the server after it has failed.

        ``refresh_s``: between two looks at what others have written; None: `refresh` is left to the caller.

        Raises:
            ConfigError: the extra `redis` is not installed.
        """
        with needs("redis", "A KV tier in Redis", param="kv_remote"):
            import redis
        self._redis: Any = redis.Redis.from_url(
            url,
            **({} if password is None else {"password": password}),
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=None,
            protocol=2,
        )
        self._root = short_root(root)
        self._prefix = b"quire:kv:%b:" % root.encode()
        self._ttl_s, self._pause_s, self._clock = ttl_s, pause_s, clock or WallClock()
        self._keys: dict[bytes, float] = {}  # with the server's time of their writing
        self._seen_s = 0.0
        self._retry_at_s = float("-inf")
        self._counts = StoreCounts()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.refresh()
        if refresh_s is not None:
            threading.Thread(
                target=self._keep_fresh, args=(refresh_s,), name="quire-kv-refresh", daemon=True
            ).start()

    def contains(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys were there when it was last asked; 0 while it fails."""
        if self._is_off():
            return 0
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))

    def kept(self, keys: Sequence[bytes]) -> int:
        """As `contains`."""
        return self.contains(keys)

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        """Fill one buffer per key, a few megabytes at a time."""
        num_whole = 0
        while num_whole < len(keys) and not self._is_off():
            piece = max(1, SPAN_BYTES // max(1, into[num_whole].nbytes))
            wanted = keys[num_whole : num_whole + piece]
            try:
                values = self._redis.mget([self._prefix + key for key in wanted])
                if len(values) != len(wanted):
                    raise ValueError(f"{len(values)} values for {len(wanted)} keys")
            except Exception as error:  # whatever the server answered
                self._failed("read_errors", error)
                break
            count = self._take(wanted, values, into[num_whole:])
            num_whole += count
            if count < len(wanted):
                break
        with self._lock:
            self._counts.blocks_read += num_whole
            self._counts.bytes_read += sum(buffer.nbytes for buffer in into[:num_whole])
        return num_whole

    def write(self, keys: Sequence[bytes], blocks: Sequence[Sequence[memoryview]]) -> int:
        """Send the blocks that are not known to be there, one after another."""
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if key in self._keys and not self._is_off():
                continue
            if self._is_off() or not self._send(key, block):
                with self._lock:
                    self._counts.blocks_refused += len(keys) - index
                return index
        return len(keys)

    def counts(self) -> StoreCounts:
        """Return the sums, and the blocks that are known; how many bytes the server has is not asked."""
        return replace(self._counts, num_blocks=len(self._keys))

    def refresh(self) -> None:
        """Learn which keys were written, by any engine, and forget those whose time is over."""
        if self._is_off():
            return
        name = self._prefix + b"index"
        try:
            seconds, micros = self._redis.time()
            now_s = seconds + micros / 1e6
            # Clocks of a server that was replaced may be behind, and writes that crossed the last look come late.
            since_s = self._seen_s - 2.0 if self._seen_s <= now_s else 0.0
            self._redis.zremrangebyscore(name, "-inf", now_s - self._ttl_s)
            found = {
                key: float(score)
                for key, score in self._redis.zrangebyscore(name, since_s, "+inf", withscores=True)
            }
        except Exception as error:  # whatever the server answered
            self._failed("read_errors", error)
            return
        with self._lock:
            self._keys.update(found)
            for key in [key for key, written_s in self._keys.items() if written_s <= now_s - self._ttl_s]:
                del self._keys[key]
        self._seen_s = now_s

    def close(self) -> None:
        """Close the connections."""
        self._closed.set()
        with self._lock:
            self._keys.clear()
        with suppress(Exception):
            self._redis.close()

    def _take(self, keys: Sequence[bytes], values: Sequence[bytes | None], into: Sequence[memoryview]) -> int:
        """Copy the leading values that are whole; drop the first that is not."""
        for index, (key, value, buffer) in enumerate(zip(keys, values, into, strict=False)):
            if isinstance(value, bytes) and len(value) == HEADER_BYTES + buffer.nbytes:
                payload = memoryview(value)[HEADER_BYTES:]
                if is_whole(self._root, key, value[:HEADER_BYTES], payload):
                    buffer[:] = payload
                    continue
            with self._lock:
                self._keys.pop(key, None)
                self._counts.blocks_lost += value is None
                self._counts.blocks_damaged += value is not None
            return index
        return len(keys)

    def _send(self, key: bytes, block: Sequence[memoryview]) -> bool:
        value = b"".join((header_of(self._root, key, block), *block))
        # The timeout is of each argument that is sent, and a recurrent state has tens of megabytes.
        first, *others = (value[start : start + SPAN_BYTES] for start in range(0, len(value), SPAN_BYTES))
        try:
            seconds, micros = self._redis.time()
            now_s = seconds + micros / 1e6
            # The pieces of two engines that write the same block must not mix.
            with self._redis.pipeline(transaction=bool(others)) as pipe:
                pipe.set(self._prefix + key, first, ex=self._ttl_s)
                for piece in others:
                    pipe.append(self._prefix + key, piece)
                pipe.zadd(self._prefix + b"index", {key: now_s})
                is_set, *_ = pipe.execute()
        except Exception as error:  # whatever the server answered
            self._failed("write_errors", error)
            return False
        if not is_set:
            return False
        with self._lock:
            self._keys[key] = now_s
            self._counts.blocks_written += 1
            self._counts.bytes_written += len(value) - HEADER_BYTES
            self._counts.wear_bytes += len(value)
        return True

    def _failed(self, count: str, error: Exception) -> None:
        """Do without the server for a while: it is gone, or it is full."""
        with self._lock:
            setattr(self._counts, count, getattr(self._counts, count) + 1)
        log.warning("remote_paused", seconds=self._pause_s, error=str(error))
        self._retry_at_s = self._clock.now() + self._pause_s

    def _is_off(self) -> bool:
        return self._closed.is_set() or self._clock.now() < self._retry_at_s

    def _keep_fresh(self, refresh_s: float) -> None:
        while not self._closed.wait(refresh_s):
            self.refresh()
