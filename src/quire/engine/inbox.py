"""The core's inbox: frozen messages, fit for msgpack, taken in at step boundaries."""

from __future__ import annotations

from dataclasses import dataclass

from quire.request import Request
from quire.scheduler.policy import PolicyChange


@dataclass(frozen=True, slots=True)
class AddRequest:
    """Queue a request."""

    request: Request


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


Message = AddRequest | AbortRequest | FinishSample | PolicyChange | Drain | Shutdown
