"""`Probe`: GETs one path beside an attack, each time over a new connection, and keeps the latencies.

``python -m tests.faults.probe URL`` does so in a process of its own until a line comes, and prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from types import TracebackType
from urllib.parse import urlsplit

INTERVAL_S = 0.02
TIMEOUT_S = 60.0


class Probe:
    """A thread that probes until the block ends. ``latencies_ms`` has one entry per answered probe, in order."""

    def __init__(self, url: str, path: str = "/livez", interval_s: float = INTERVAL_S) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._address = (parts.hostname, parts.port)
        self._request = f"GET {path} HTTP/1.1\r\nhost: probe\r\nconnection: close\r\n\r\n".encode()
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.latencies_ms: list[float] = []
        self.statuses: dict[str, int] = {}
        self.failed: list[str] = []

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S + 5)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.once()
            self._stop.wait(self._interval_s)

    def once(self) -> None:
        start_s = time.perf_counter()
        try:
            with socket.create_connection(self._address, TIMEOUT_S) as sock:
                sock.sendall(self._request)
                answer = b""
                while b"\r\n\r\n" not in answer and (piece := sock.recv(4096)):
                    answer += piece
            status = answer.split(b" ", 2)[1].decode() if answer else "closed"
        except (OSError, IndexError) as error:
            self.failed.append(repr(error))
            return
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self.latencies_ms.append((time.perf_counter() - start_s) * 1e3)

    def quantile_ms(self, q: float) -> float:
        """Return a quantile of the latencies, as of the function."""
        return quantile_ms(self.latencies_ms, q, self._interval_s)

    @property
    def max_ms(self) -> float:
        return max(self.latencies_ms)

    def describe(self) -> str:
        return (
            f"{len(self.latencies_ms)} probes, p50 {self.quantile_ms(0.5):.1f} ms, "
            f"p99 {self.quantile_ms(0.99):.1f} ms, max {self.max_ms:.1f} ms, {self.statuses}, {len(self.failed)} failed"
        )


def quantile_ms(latencies_ms: list[float], q: float, interval_s: float = INTERVAL_S) -> float:
    """Return the nearest-rank quantile, for example 0.99.

    A slow probe delays the ones after it. They count as if they had been sent on time (HdrHistogram's correction).
    """
    interval_ms = interval_s * 1e3
    ordered = sorted(ms - i * interval_ms for ms in latencies_ms for i in range(1 + int(ms / interval_ms)))
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def send_raw(
    url: str, path: str, body: bytes, *, media_type: str = "application/json", timeout_s: float = 300.0
) -> tuple[int, bytes]:
    """POST ``body`` over a plain socket (which holds the GIL of this process for no time); return status and body."""
    parts = urlsplit(url)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: {media_type}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port), timeout_s) as sock:
        answer = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before the end of the body
            sock.sendall(head.encode() + body)
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(1 << 16):
                answer += piece
    status, _, rest = answer.partition(b"\r\n\r\n")
    return (int(status.split(b" ", 2)[1]) if status else 0), rest


def main() -> None:
    with Probe(sys.argv[1]) as probe:
        sys.stdin.readline()
    said = {"latencies_ms": probe.latencies_ms, "statuses": probe.statuses, "failed": len(probe.failed)}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
