"""What an answer says of its tokens, in any of the dialects, whole or streamed.

Where an answer does not say it, its text is counted: each piece of text is one token at least, as servers stream them,
and no token has more than `BYTES_PER_TOKEN` bytes. Text that follows the last ``usage`` of a stream is added to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from quire_gateway.answer_texts import pieces_of
from quire_gateway.stream_errors import StreamError, error_in, may_have_error

BYTES_PER_TOKEN = 4  # of an answer's text that is counted
_RESPONSES = "/v1/responses"
_STRING = rb'"\s*:\s*"((?:[^"\\]|\\.)+)"'
_TEXT = re.compile(
    rb'"(?:text|content|reasoning|reasoning_content|refusal|thinking|partial_json|arguments|response)'
    + _STRING
)
_DELTA = re.compile(rb'"delta' + _STRING)  # of Responses, which send each text once more as a whole
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
    tokens_evaluated: int | None = None  # llama.cpp's, at the end
    tokens_cached: int | None = None
    tokens_predicted: int | None = None
    details: Any = None  # TGI's, at the end: {generated_tokens}
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
    engine_s: float = 0.0
    kv_block_s: float = 0.0
    error: StreamError | None = None  # which ended the stream
    num_texts: int = 0  # pieces of text behind the last count of the output
    num_text_bytes: int = 0

    @property
    def uncounted(self) -> int:
        """Tokens of the text that no count covers, at the least."""
        return max(self.num_texts, -(-self.num_text_bytes // BYTES_PER_TOKEN))

    @property
    def is_estimate(self) -> bool:
        """Whether any count of tokens is not the answer's own."""
        return self.prompt_tokens is None or self.num_texts > 0

    def read_whole(self, body: bytes) -> bool:
        """Take what a whole answer says, and count its text if it does not say it; return whether it is JSON."""
        if not self.read(body):
            return False
        if self.output_tokens is None:
            value = msgspec.json.decode(body)
            for piece in pieces_of(value) if isinstance(value, dict) else ():
                self._count(piece.text.encode("utf-8", "surrogatepass"))
        return True

    def read(self, data: bytes) -> bool:
        """Take what a JSON answer or the data of one event says; return whether it is JSON."""
        try:
            envelope = _decode(data)
        except msgspec.ValidationError:
            return True  # JSON of another form, which says nothing of tokens
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False
        if envelope.message is not None and envelope.message.usage is not None:
            envelope.message.usage.output_tokens = None  # message_start has a number that is no count yet
        for part in (envelope, envelope.message, envelope.response):
            if part is not None:
                self._take(part)
        return True

    def read_frames(self, frames: bytes, path: str = "") -> None:
        """Take what whole frames of a stream of ``path`` say; those without ``usage`` are only searched."""
        texts = _DELTA if path == _RESPONSES else _TEXT
        if may_have_error(frames):
            self.error = self.error or error_in(frames)
        if self.answer_id is not None and not _HAS_USAGE.search(frames):
            self._count(*texts.findall(frames))
            return
        for line in frames.splitlines():
            if line.startswith(b"data:"):
                self._count(*texts.findall(line))
                if self.answer_id is None or b'"usage"' in line:
                    self.read(line[5:])

    def read_lines(self, frames: bytes, path: str = "") -> None:
        """Take what whole lines of Ollama's API say: only the last one of an answer has counts."""
        self._count(*_TEXT.findall(frames))
        if b'"error"' in frames:
            self.error = self.error or error_in(frames)
        if b'"prompt_eval_count"' in frames:
            self.read(frames.splitlines()[-1])

    def _count(self, *texts: bytes) -> None:
        self.num_texts += len(texts)
        self.num_text_bytes += sum(map(len, texts))

    def _take_output(self, count: int | None) -> None:
        if count is not None:
            self.output_tokens = count
            self.num_texts = self.num_text_bytes = 0

    def _take(self, envelope: _Envelope) -> None:
        self.answer_id = self.answer_id or envelope.id
        counts = envelope.usage
        if counts is None:
            self.prompt_tokens = _first(
                envelope.prompt_eval_count, envelope.tokens_evaluated, self.prompt_tokens
            )
            self._take_output(_first(envelope.eval_count, envelope.tokens_predicted, _generated(envelope)))
            self.cached_tokens = _first(
                envelope.prompt_eval_cached_count, envelope.tokens_cached, self.cached_tokens
            )
            return
        details = counts.prompt_tokens_details or counts.input_tokens_details
        self.prompt_tokens = _first(counts.prompt_tokens, counts.input_tokens, self.prompt_tokens)
        self._take_output(_first(counts.completion_tokens, counts.output_tokens))
        cached = details.cached_tokens if details is not None else counts.cache_read_input_tokens
        self.cached_tokens = _first(cached, self.cached_tokens)


def _generated(envelope: _Envelope) -> int | None:
    count = envelope.details.get("generated_tokens") if isinstance(envelope.details, dict) else None
    return count if type(count) is int else None


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
