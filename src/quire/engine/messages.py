"""The messages of the engine's inbox: what `EngineCore` is told and asked, and how it replies.

They are frozen and fit for msgpack, and take effect at step boundaries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.executor.profile_control import TakeProfile
from quire.request import Request
from quire.scheduler.settings import PolicyChange
from quire.step import TransferDone


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """The client went away: end every sample of the request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class FinishSample:
    """A stop string was completed by output token ``num_output_tokens``; the tokens beyond are dropped."""

    request_id: str
    sample_index: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more requests; those here go on to their end."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End everything now, with abort events."""


@dataclass(frozen=True, slots=True)
class ChangePolicy:
    """A `PolicyChange` that is answered with a `Reply`: the settings before and after. An empty one just reads them.

    Settings of an SLO's controller are pinned by it, until they are in ``release``.
    """

    call_id: str
    change: PolicyChange
    release: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget every cached prefix; answered with a `Reply`."""

    call_id: str


@dataclass(frozen=True, slots=True)
class SaveRecording:
    """Save what the flight recorder has; answered with a `Reply`: path and number of steps."""

    call_id: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The core's answer to a message with a ``call_id``, after it took effect. With ``error`` nothing has changed."""

    call_id: str
    values: dict[str, Any]  # the values now
    before: dict[str, Any] = field(default_factory=dict)  # the values before, where something was changed
    error: str | None = None  # the text of a ConfigError
    param: str | None = None  # the setting at fault
    # Of the controller's settings, those that a person set; None: no controller.
    pinned: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class ControlPolicy:
    """A change that the SLO controller wants, from inside the engine: settings that a person pinned stay."""

    change: PolicyChange


@dataclass(frozen=True, slots=True)
class LoadKv:
    """Let a waiting request wait for up to the first ``num_blocks`` blocks of its prompt, which ``remote`` has."""

    request_id: str
    remote: str
    num_blocks: int
    handle: str = ""


@dataclass(frozen=True, slots=True)
class StoreKv:
    """Copy the cached block ``block_hash``, and up to ``num_blocks`` − 1 before it, to ``remote``."""

    block_hash: bytes
    remote: str
    num_blocks: int = 1
    handle: str = ""


@dataclass(frozen=True, slots=True)
class TransfersDone:
    """Transfers ended while no step was out to tell it."""

    ended: tuple[TransferDone, ...]


@dataclass(frozen=True, slots=True)
class TakeCacheEvents:
    """Take out the cache's events since the last call; answered with a `Reply` that has them packed (`cache.events`).

    With ``snapshot``, and where events were lost, they are all blocks that there are (``snapshot`` in the reply).
    """

    call_id: str
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class TakeLive:
    """What a page that watches draws; answered with a `Reply`, see `scheduler.live`."""

    call_id: str


CoreCall = ChangePolicy | ResetPrefixCache | SaveRecording | TakeCacheEvents | TakeLive | TakeProfile
Message = (
    Request  # to be queued
    | AbortRequest
    | FinishSample
    | PolicyChange
    | CoreCall
    | LoadKv
    | StoreKv
    | TransfersDone
    | Drain
    | Shutdown
)
