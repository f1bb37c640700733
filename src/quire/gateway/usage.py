"""What an answer says of its tokens, in any of the dialects, whole or streamed."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

_HAS_USAGE = re.compile(rb'"usage"\s*:\s*\{')


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Counts(msgspec.Struct):
    """``usage`` of OpenAI's completions and chats, of Responses, and of Anthropic's messages."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None


class _Envelope(msgspec.Struct):
    id: str | None = None
    model: str | None = None
    system_fingerprint: str | None = None
    usage: _Counts | None = None
    prompt_eval_count: int | None = None  # Ollama's, at the end
    prompt_eval_cached_count: int | None = None  # of replicas of Quire
    eval_count: int | None = None
    message: _Envelope | None = None  # Anthropic's message_start
    response: _Envelope | None = None  # events of Responses


_decode = msgspec.json.Decoder(_Envelope).decode


@dataclass(slots=True)
class Usage:
    """Tokens of one request; None: the answer did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    answer_id: str | None = None

    def read(self, data: bytes) -> bool:
        """Take what a JSON answer or the data of one event says; return whether it is JSON."""
        try:
            envelope = _decode(data)
        except msgspec.ValidationError:
            return True  # JSON of another form, which says nothing of tokens
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False
        for each in (envelope, envelope.message, envelope.response):
            if each is not None:
                self._take(each)
        return True

    def read_frames(self, frames: bytes) -> None:
        """Take what whole frames of a stream say; those without ``usage`` are only searched."""
        if self.answer_id is not None and not _HAS_USAGE.search(frames):
            return
        for line in frames.splitlines():
            if line.startswith(b"data:") and (self.answer_id is None or b'"usage"' in line):
                self.read(line[5:])

    def read_lines(self, frames: bytes) -> None:
        """Take what whole lines of Ollama's API say: only the last one of an answer has counts."""
        if b'"prompt_eval_count"' in frames:
            self.read(frames.splitlines()[-1])

    def _take(self, envelope: _Envelope) -> None:
        self.answer_id = self.answer_id or envelope.id
        counts = envelope.usage
        if counts is None:
            self.prompt_tokens = _first(envelope.prompt_eval_count, self.prompt_tokens)
            self.output_tokens = _first(envelope.eval_count, self.output_tokens)
            self.cached_tokens = _first(envelope.prompt_eval_cached_count, self.cached_tokens)
            return
        details = counts.prompt_tokens_details or counts.input_tokens_details
        self.prompt_tokens = _first(counts.prompt_tokens, counts.input_tokens, self.prompt_tokens)
        self.output_tokens = _first(counts.completion_tokens, counts.output_tokens, self.output_tokens)
        cached = details.cached_tokens if details is not None else counts.cache_read_input_tokens
        self.cached_tokens = _first(cached, self.cached_tokens)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
