"""``[regions]`` of the gateway's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.args import make_args
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RegionArgs:
    """``[regions]``. ``latency_ms`` is kept apart: region → milliseconds of a round trip from here."""

    own: str = ""
    spill_s: float = 2.0
    return_s: float = 0.5
    return_after_s: float = 30.0


@dataclass(frozen=True, slots=True)
class RegionConfig:
    args: RegionArgs
    latency_ms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_table(cls, table: Mapping[str, Any], origin: str) -> RegionConfig | None:
        """Return the configuration of ``[regions]``; None without the table.

        Raises:
            ConfigError: names the key that is wrong.
        """
        if not table:
            return None
        where, latency_ms = f"{origin}: [regions]", table.get("latency_ms", {})
        args = make_args(RegionArgs, {k: v for k, v in table.items() if k != "latency_ms"}, origin=where)
        if not isinstance(latency_ms, dict) or any(
            type(ms) not in (int, float) or not 0 <= ms < 1e6 for ms in latency_ms.values()
        ):
            raise ConfigError(f"{where}: latency_ms = {latency_ms!r} must be a table of milliseconds ≥ 0")
        if not args.own:
            raise ConfigError(f"{where}: own is required: it must be the region of this gateway")
        if args.return_s > args.spill_s:
            raise ConfigError(
                f"{where}: return_s = {args.return_s:g} must be at most spill_s = {args.spill_s:g}"
            )
        return cls(args, latency_ms)
