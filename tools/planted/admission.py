"""Planted faults in the gateway's admission: limits, bounds, bursts."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "late-loop",
        "a time limit counts what the loop itself is late",
        "src/quire/gateway/patience.py",
        "        if len(timers) < TICKS:",
        "        if len(timers) < 1:",
        ("tests/gateway/test_bursts.py::test_a_late_loop_ends_no_attempt",),
    ),
    Mutant(
        "openings-of-one-backend",
        "connects to one backend are bounded by the total alone",
        "src/quire/gateway/openings.py",
        "async with self._of[key], self._all:",
        "async with self._all:",
        ("tests/gateway/test_bursts.py::test_connections_are_opened_a_few_at_a_time",),
    ),
    Mutant(
        "no-room-is-a-dead-backend",
        "a backend that was not asked, since no file is free, is called down",
        "src/quire/gateway/upstream.py",
        "error.errno in _NO_ROOM",
        "error.errno is None",
        ("tests/gateway/test_bursts.py::test_a_lack_of_files_or_ports_is_no_fault_of_a_backend",),
    ),
    Mutant(
        "no-room-without-its-time",
        "a request that the gateway has no room for is a 502 without Retry-After",
        "src/quire/gateway/proxy.py",
        '    if error.kind == "room":\n        return busy',
        '    if error.kind == "full":\n        return busy',
        ("tests/gateway/test_bursts.py::test_without_room_the_answer_is_503_with_its_time",),
    ),
)
