"""`TakeProfile`: the message that starts and stops profiles of steps. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from quire.errors import ConfigError


class Profiles(Protocol):
    """What profiles an executor (`quire.executor.profiled`)."""

    def start(self, num_steps: int | None) -> dict[str, Any]: ...

    def stop(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class TakeProfile:
    """Start or stop a profile; the core answers with a `Reply`."""

    call_id: str
    start: bool
    num_steps: int | None = None  # after which it ends

    def carry_out(self, profiles: Profiles | None) -> dict[str, Any]:
        """Return the fields of the reply: values, or an error."""
        try:
            if profiles is None:
                raise ConfigError("Profiles have no folder: start the server with --profile-dir.")
            return {"values": profiles.start(self.num_steps) if self.start else profiles.stop()}
        except ConfigError as error:
            return {"values": {}, "error": str(error)}
