"""The flags of `quire profile`, as data (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.args import flag


@dataclass(frozen=True, slots=True)
class ProfileArgs:
    """What to measure and where to write it."""

    out: str | None = flag(None, "File for the profile (JSON).", group="Profile")
    seconds: float = flag(100.0, "Seconds for the steps of the engine.", group="Profile", low=1.0)
    serving: bool = flag(True, "Then measure what the server around the engine adds, in about 20 seconds.",
                         group="Profile")  # fmt: skip
