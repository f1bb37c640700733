"""`Slo`: the latency targets of a service, written ``ttft=500ms,tpot=50ms``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace

from quire.errors import ConfigError, nearest

# Applications by name, with the limits that texts on serving give. Chat is read, a completion in an editor has to be
# there while one types, speech must not run out of text, and of a batch only the whole answer counts.
APPLICATIONS = {
    "chat": "ttft=500ms,tpot=50ms",
    "code": "ttft=100ms,tpot=25ms",
    "voice": "ttft=300ms,tpot=20ms",
    "batch": "e2el=60s",
}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*(us|ms|s)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits of a request's latencies in seconds; None: no limit. A request that meets all counts as goodput."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read ``ttft=500ms,tpot=50ms,e2el=10s``; any of the three, units us, ms or s.

        A name of `APPLICATIONS` may stand first; limits behind it replace its own: ``chat,tpot=30ms``.

        Raises:
            ConfigError: names the part, what is wrong with it and what is allowed.
        """
        parts = [p for p in (p.strip() for p in text.split(",")) if p]
        preset = cls.parse(APPLICATIONS[parts.pop(0)]) if parts and parts[0] in APPLICATIONS else cls()
        limits: dict[str, float] = {}
        for part in parts:
            name, equals, value = (p.strip() for p in part.partition("="))
            if not equals or f"{name}_s" not in _NAMES:
                hint = nearest(name, ("ttft", "tpot", "e2el", *APPLICATIONS))
                known = f"ttft=…, tpot=… or e2el=…, nor, as the first, one of {', '.join(APPLICATIONS)}"
                raise ConfigError(f"--slo {text!r}: {part!r} is not {known}{hint}")
            if f"{name}_s" in limits:
                raise ConfigError(f"--slo {text!r}: {name} is given twice")
            limits[f"{name}_s"] = parse_seconds(value, f"--slo {name}")
        if not limits and preset == cls():
            raise ConfigError(f"--slo {text!r} gives no limit; write for example ttft=500ms,tpot=50ms")
        return replace(preset, **limits)

    def met(self, ttft_s: float | None, tpot_s: float | None, e2el_s: float | None) -> bool:
        """Whether every limit holds. A TPOT of None (a single token) meets any limit, a TTFT of None none."""
        if ttft_s is None or e2el_s is None:
            return False
        values = (ttft_s, tpot_s, e2el_s)
        limits = (self.ttft_s, self.tpot_s, self.e2el_s)
        return all(v is None or limit is None or v <= limit for v, limit in zip(values, limits, strict=True))

    def as_dict(self) -> dict[str, float]:
        """Return the limits that are set, in milliseconds, as ``ttft_ms``, ``tpot_ms``, ``e2el_ms``."""
        limits = {name: getattr(self, name) for name in _NAMES}
        return {name.replace("_s", "_ms"): v * 1e3 for name, v in limits.items() if v is not None}

    def __str__(self) -> str:
        return ",".join(f"{name.removesuffix('_ms')}={v:g}ms" for name, v in self.as_dict().items())


_NAMES = tuple(f.name for f in fields(Slo))


def parse_seconds(text: str, name: str) -> float:
    """Read a time with its unit, ``500ms`` or ``0.5s``, as seconds.

    Raises:
        ConfigError: no number, no unit, or not above 0; the message names ``name``.
    """
    match = _TIME.fullmatch(text.strip())
    value = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if not 0.0 < value < math.inf:
        raise ConfigError(f"{name} = {text!r} must be a time above 0 with its unit, such as 500ms or 0.5s")
    return value
