"""`EngineClient`: how the API side talks to an engine, in this process or in a child.

    send(message)  ──>  inbox of the core          (never blocks)
    receive()      <──  token events, a step's at a time   (blocks)

The methods are synchronous. The offline API calls `receive` in its own loop, the asyncio frontend from one thread.
`send` may be called from any thread, `receive` from one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from quire.engine.inbox import Message, Reply
from quire.metrics.engine_stats import EngineStats
from quire.request import TokenEvent

Determinism = Literal["exact", "batch-dependent"]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself once it is loaded."""

    num_kv_tokens: int  # tokens the block pool holds
    kv_bytes: int
    weight_bytes: int
    kernels: str  # one line for a person: "native avx512 (2 threads)"
    determinism: Determinism
    load_s: float  # from the start of the load to ready
    pid: int


class EngineClient(Protocol):
    """One engine: in this process (`inproc`), in a child (`process`), or either under a `Supervisor`."""

    def wait_ready(self) -> EngineInfo:
        """Block until the model is loaded.

        Raises:
            ModelLoadError, ConfigError: the engine could not load, in one line.
            EngineDeadError: it died while loading.
        """
        ...

    def send(self, message: Message) -> None:
        """Put a message in the core's inbox. After the engine's death the message is lost (see `receive`)."""
        ...

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        """Return the next events, or an empty list after ``timeout_s`` seconds or when closed.

        Raises:
            EngineDeadError: the engine is gone; every later call raises it too.
        """
        ...

    def replies(self) -> list[Reply]:
        """Return the answers to calls that came with the last `receive` (which wakes for them). Does not block."""
        ...

    def stats(self) -> EngineStats:
        """Return the latest numbers of the engine (at most about a second old). Does not block."""
        ...

    def close(self) -> None:
        """Stop the engine and wake a blocked `receive`. Requests in flight end without events."""
        ...
