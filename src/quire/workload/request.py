"""`WorkloadRequest`: one request of a workload, before anybody has served it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request: when it is sent, how long it is, what it shares. `quire.workload.prompts` gives it content."""

    arrival_s: float  # intended send time, since the start of the run
    num_prompt_tokens: int  # of a later turn: the whole conversation so far
    num_output_tokens: int
    index: int = 0  # place in the workload
    hash_ids: tuple[int | str, ...] = ()  # equal ids at the front: an equal prefix, a block of tokens each
    # Tokens that one of them stands for; the last block may be cut by the prompt's end.
    hash_block_size: int = 0
    session: str | None = None
    turn: int = 0  # of its session; it is sent no earlier than the answer to the turn before
    think_s: float = 0.0  # seconds between that answer's last token and this turn
    text: str | None = None  # what the user says in this turn, where the trace holds it
    cancel_after_tokens: int | None = None  # the client leaves when it has got so many tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output: the context that the request needs."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and what was left out of the source."""

    requests: tuple[WorkloadRequest, ...]
    refused: Mapping[str, int]  # reason → rows of the source that are not among the requests
    source: str  # for the report: the trace's name, or the distributions

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())
