"""`Relayed`: what lets an answer go on where another server, or this one's journal, has left it.

A gateway sends it with a request, so that another replica can continue the answer where this one died:

    x-quire-gateway-key   the key of --gateway-key; without it the other two headers have no effect
    x-quire-answer        "<32 hexadecimal digits> <created> <seed>": the answer's id, its time, the seed of a request
                          that gives none
    x-quire-resume        "1": the body is {"request": the client's, "fingerprint": of the first replica, "elapsed_s":
                          since it got the request, "delivered": [`Delivered`, …]}

The stream of such an answer is tagged (``x-quire-tagged`` has this replica's fingerprint): each group of events follows
a line ``:N TAG``, where N is the group's length in bytes and TAG is what of the output it covers: a `Delivered`, 0 for
the end of the stream, or the status of the error that ends it. A group may be empty: its text is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Scope

from quire.api.token_logprobs import FLOOR
from quire.engine.output import OutputChunk
from quire.engine.prompts import Begun
from quire.errors import RequestError, clip
from quire.http.account import has_gateway_key
from quire.http.body import header
from quire.http.call import AnswerName, Call
from quire.http.limits import TEXT_CHARACTERS
from quire.request import FinishReason, TokenEvent, TokenLogprobs

# Bytes of the resume form, next to the client's body.
MAX_DELIVERED_BYTES = TEXT_CHARACTERS
TAGGED = b"x-quire-tagged"
_encode = msgspec.json.Encoder().encode


class Delivered(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of one choice, as far as it is needed to bring parsers and counts to where they were after it."""

    choice: int
    token_ids: tuple[int, ...]
    cached_tokens: int  # tokens of all prompts of the request so far
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class _Resumption(msgspec.Struct):
    request: Any
    delivered: list[Delivered]
    fingerprint: str
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Relayed:
    """An answer that a gateway relays. ``delivered``: what its client has of it, in order; empty at first."""

    answer: AnswerName
    delivered: Sequence[Delivered] = ()
    # That of the replica that began the answer; None where this one does.
    fingerprint: str | None = None
    elapsed_s: float = 0.0  # since it arrived at its first replica
    by_gateway: bool = True  # else by the journal of this server

    @property
    def is_resumed(self) -> bool:
        return self.fingerprint is not None

    def check(self, own: str, num_choices: int) -> None:
        """Check that this server's answer, whose fingerprint is ``own``, can go on behind what was delivered.

        Raises:
            RequestError: its tokens may differ, or there is no such choice.
        """
        for part in self.delivered:
            if not 0 <= part.choice < num_choices:
                raise RequestError(
                    f"delivered has choice {part.choice}, of {num_choices}.", param="delivered"
                )
        if self.fingerprint not in (None, own):
            raise RequestError(
                f"The stream began with the fingerprint {clip(self.fingerprint)}, and this server has {own!r}.",
                code="fingerprint_differs",
            )

    @property
    def cached_tokens(self) -> int:
        return max((part.cached_tokens for part in self.delivered), default=0)

    def of_prompt(self, prompt: int, n: int) -> Begun:
        """Return what of it belongs to one prompt of the request."""
        first = prompt * n
        events = [
            TokenEvent("", part.choice - first, part.token_ids, part.logprobs, part.finish_reason, part.stop_token_id)
            for part in self.delivered
            if first <= part.choice < first + n
        ]  # fmt: skip
        return Begun(self.answer.seed_of(prompt), events, self.elapsed_s)


def resumes(scope: Scope, key: str | None) -> bool:
    """Whether the body is a resume form. Its request has its place: a full queue does not refuse it."""
    return header(scope, b"x-quire-resume") is not None and has_gateway_key(scope, key)


def read_relayed(call: Call, scope: Scope, body: Any, key: str | None) -> tuple[Relayed | None, Any]:
    """Return what lets the answer go on elsewhere, None if nothing does, and the client's body.

    Raises:
        RequestError: the gateway's headers or its resume form are wrong.
    """
    if call.answer is not None:  # a call in this process
        return Relayed(call.answer), body
    line = header(scope, b"x-quire-answer")
    if line is None or not has_gateway_key(scope, key):
        return None, body
    answer = AnswerName.read(line.decode("latin-1"))
    if not resumes(scope, key):
        return Relayed(answer), body
    try:
        form = msgspec.convert(body, _Resumption)
    except msgspec.ValidationError as error:
        raise RequestError(f"The resume form is wrong: {error}.", code="invalid_resume_form") from None
    return Relayed(answer, form.delivered, form.fingerprint, max(0.0, form.elapsed_s)), form.request


def write_tag(choice: int, chunk: OutputChunk, cached_tokens: int) -> bytes:
    """Return the `Delivered` of a chunk as JSON."""
    logprobs = chunk.logprobs
    if logprobs is not None:
        logprobs = tuple(_finite(entry) for entry in logprobs)
    return _encode(
        Delivered(choice, chunk.token_ids, cached_tokens, chunk.finish_reason, chunk.stop_token_id, logprobs)
    )


class Tags:
    """Writes the groups of a stream with their tags."""

    def __init__(self, fingerprint: str) -> None:
        self.headers = ((TAGGED, fingerprint.encode()),)

    def chunk(self, choice: int, chunk: OutputChunk, cached_tokens: int, events: bytes) -> bytes:
        return b":%d %b\n%b" % (len(events), write_tag(choice, chunk, cached_tokens), events)

    def end(self, status: int, events: bytes) -> bytes:
        """``status``: of the error that ends the stream, or 0."""
        return b":%d %d\n%b" % (len(events), status, events)


def _finite(entry: TokenLogprobs) -> TokenLogprobs:
    tops = tuple(max(logprob, FLOOR) for logprob in entry.top_logprobs)
    return entry._replace(logprob=max(entry.logprob, FLOOR), top_logprobs=tops)
