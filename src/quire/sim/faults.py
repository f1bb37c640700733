"""Faults at given times: a replica dies, a replica is slow for a while, or more replicas are started.

kill:at=30,replica=0              replica 0 dies at 30 s; a new one is ready after the start-up time
kill:at=30,replica=0,restart=no   the same without a replacement
slow:at=10,until=40,replica=1,factor=3
add:at=60,count=2                 two more replicas, ready after the start-up time
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import ConfigError

_HOW = (
    "write kill:at=SECONDS,replica=N[,restart=no], slow:at=SECONDS,until=SECONDS,replica=N,factor=X or "
    "add:at=SECONDS,count=N"
)


@dataclass(frozen=True, slots=True)
class Kill:
    """The replica dies. Its requests in flight go to others, with the tokens that their clients already have."""

    at: float
    replica: int
    restart: bool = True


@dataclass(frozen=True, slots=True)
class Slow:
    """Steps submitted between ``at`` and ``until`` take ``factor`` times as long."""

    at: float
    until: float
    replica: int
    factor: float


@dataclass(frozen=True, slots=True)
class Add:
    """Start ``count`` more replicas."""

    at: float
    count: int = 1


Fault = Kill | Slow | Add


def parse_fault(text: str) -> Fault:
    """Read one fault; see the module.

    Raises:
        ConfigError: says what is wrong and how to write it.
    """
    kind, _, rest = text.partition(":")
    parts = dict(part.partition("=")[::2] for part in rest.split(",")) if rest else {}
    try:
        fault = _make(kind.strip(), {key.strip(): value.strip() for key, value in parts.items()})
    except ValueError:
        fault = None
    if fault is None:
        raise ConfigError(f"fault {text!r} is not understood: {_HOW}")
    return fault


def _make(kind: str, parts: dict[str, str]) -> Fault | None:
    match kind, parts:
        case "kill", {"at": at, "replica": replica, **rest} if rest in (
            {},
            {"restart": "no"},
            {"restart": "yes"},
        ):
            return Kill(_time(at), _index(replica), rest.get("restart") != "no")
        case "slow", {"at": at, "until": until, "replica": replica, "factor": factor} if len(parts) == 4:
            slow = Slow(_time(at), _time(until), _index(replica), float(factor))
            return slow if slow.until > slow.at and 0.0 < slow.factor < math.inf else None
        case "add", {"at": at, **rest} if rest.keys() <= {"count"}:
            count = int(rest.get("count", "1"))
            return Add(_time(at), count) if count > 0 else None
    return None


def _time(text: str) -> float:
    value = float(text.removesuffix("s"))
    if not 0.0 <= value < math.inf:
        raise ValueError(text)
    return value


def _index(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def check_faults(faults: Iterable[Fault], num_replicas: int) -> None:
    """Raise `ConfigError` where a fault names a replica that will not exist at its time."""
    known = num_replicas
    for fault in sorted(faults, key=lambda fault: fault.at):
        if isinstance(fault, Add):
            known += fault.count
        elif fault.replica >= known:
            raise ConfigError(
                f"fault {fault}: replica {fault.replica} does not exist then; there are {known}, from 0 on"
            )
