"""The probe that the attacks are measured with tells a stall, with the probes that it delayed."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from tests.faults.probe import Probe

pytestmark = pytest.mark.system

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


def serve(listener: socket.socket, stall_s: float) -> None:
    """Answer probes; stall once, before the third."""
    for number in range(10**6):
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        with sock:
            sock.recv(4096)
            if number == 2:
                time.sleep(stall_s)
            sock.sendall(OK)


def test_a_stall_counts_with_the_probes_it_delayed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener, 0.4), daemon=True).start()
        with Probe(f"http://127.0.0.1:{listener.getsockname()[1]}") as probe:
            time.sleep(0.7)
        listener.shutdown(socket.SHUT_RDWR)
    assert probe.failed == []
    assert list(probe.statuses) == ["200"]
    assert probe.max_ms >= 400
    assert probe.quantile_ms(0.8) > 100  # about 20 of 35 probes were due while it stalled
