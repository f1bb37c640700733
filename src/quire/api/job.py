"""`Job`: a checked request, with how its answer is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.api.replies import Head, Usage
from quire.engine.output import OutputChunk
from quire.http.refusals import Refusal
from quire.request import Deadline, Pooling, SamplingParams


class Answer(Protocol):
    """How the chunks of a request are written: as one body, or as server-sent events."""

    head: Head
    streamed: bool

    def whole(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        """The body of an answer that is not streamed: one chunk for each choice, the token ids of each prompt."""

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        """The events before any chunk. ``echoes``: the text of each prompt where it is asked for, else empty."""

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        """The events of one chunk of one choice; empty where it says nothing yet."""

    def closing(self, usage: Usage) -> bytes:
        """The events behind the last chunk."""

    def error(self, refusal: Refusal) -> bytes:
        """The end of a stream that had begun and failed."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: what to run and how to answer."""

    prompts: Sequence[str | list[int]]
    sampling: SamplingParams
    answer: Answer
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    continues: bool = False  # the output goes on from the prompt's text
    client_request_id: str | None = None  # the body's request_id or rid
    prompt_text: str | None = None  # of a chat: what its template made
    # Keep this many tokens at the end of each prompt; -1: what the context holds.
    truncate_to: int | None = None
    deadline: Deadline | None = None
    timing: bool = False  # the answer says where its time went
    in_background: bool = False  # answered with the id at once; for responses alone
    echo: bool = False  # each choice begins with its prompt's text
    pooling: Pooling | None = None  # no answers, but what it asks of each prompt
    prompt_param: str = "prompt"  # what the endpoint calls its prompts

    @property
    def draws_nothing(self) -> bool:
        """Whether the prompts are all there is to compute."""
        return self.pooling is not None or self.sampling.max_tokens == 0
