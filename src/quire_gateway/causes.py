"""Causes of fallbacks: what the failure of an attempt, or a backend's refusal, is an example of."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from quire_gateway.catalog import Target
from quire_gateway.config import Cause
from quire_gateway.upstream import READ_BYTES, BackendFailed, Reply

# What servers say of a prompt that is too long, and of one that a filter refuses: codes, or parts of the message.
_LENGTH_CODES = ("context_length_exceeded",)
_LENGTH_TEXTS = ("maximum context length", "context window", "prompt is too long", "max_model_len")
_FILTER_CODES = ("content_filter", "content_policy_violation", "ResponsibleAIPolicyViolation")


class _Error(msgspec.Struct):
    message: str = ""
    code: str | int | None = None
    type: str | None = None


class _Refused(msgspec.Struct):
    error: _Error


def causes_of_failure(error: BackendFailed) -> frozenset[Cause]:
    """Return what a failed attempt is an example of."""
    return frozenset(("failure",)) if error.answer is None else causes_of_answer(error.answer)


def causes_of_answer(answer: Reply) -> frozenset[Cause]:
    """Return what an answer is an example of; nothing for one that is good, or whose client is wrong."""
    status = answer.status
    if status == 429:
        return frozenset(("429", "saturated"))
    if status == 503:
        return frozenset(("5xx", "saturated"))
    if status >= 500:
        return frozenset(("5xx", "failure"))
    return _of_refusal(answer.body) if status in (400, 413) else frozenset()


def may_fall_back(causes: Iterable[Cause], targets: Iterable[Target]) -> bool:
    """Whether one of ``targets`` is a fallback for one of ``causes``."""
    causes_wanted = frozenset(causes)
    return any(target.is_fallback and target.when & causes_wanted for target in targets)


def _of_refusal(body: bytes) -> frozenset[Cause]:
    try:
        error = msgspec.json.decode(body[:READ_BYTES], type=_Refused).error
    except (msgspec.DecodeError, UnicodeError):
        return frozenset()
    names, text = (error.code, error.type), error.message.lower()
    if any(code in names for code in _LENGTH_CODES) or any(part in text for part in _LENGTH_TEXTS):
        return frozenset(("context_length",))
    return frozenset(("content_filter",)) if any(code in names for code in _FILTER_CODES) else frozenset()
