"""The flags of `quire profile` (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProfileArgs:
    """What to measure and where to write it."""

    out: str | None = None
    seconds: float = 100.0
    steps: str | None = None
    serving: bool = True
