"""``context_management`` of Anthropic's messages and of responses: the rules that change nothing here are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from quire.errors import RequestError, clip

_TRIGGER_TOKENS = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}  # Anthropic's defaults
_KEPT_TOOL_USES, _KEPT_TURNS = 3, 1  # Anthropic's as well


def check_edits(
    management: dict[str, Any] | None, messages: list[Any], max_model_len: int, ignored: list[str] | None
) -> None:
    """Check Anthropic's ``context_management`` of a request with these ``messages`` (as they came).

    Raises:
        RequestError: an edit that could change this conversation, or one that is not known.
    """
    edits = (management or {}).get("edits")
    if management and not isinstance(edits, list):
        raise _refusal("context_management", management)
    for i, edit in enumerate(edits or ()):
        if not (isinstance(edit, dict) and _changes_nothing(edit, messages, max_model_len)):
            raise _refusal(f"context_management.edits[{i}]", edit)
    if edits and ignored is not None:
        ignored.append("context_management")


def check_compaction(entries: list[Any] | None, max_model_len: int, ignored: list[str] | None) -> None:
    """Check the Responses API's ``context_management``.

    Raises:
        RequestError: an entry that could change a conversation of ``max_model_len`` tokens.
    """
    for i, entry in enumerate(entries or ()):
        kind = entry.get("type") if isinstance(entry, dict) else None
        if kind != "compaction" or not _number(entry.get("compact_threshold"), 0) >= max_model_len:
            raise _refusal(f"context_management[{i}]", entry)
    if entries and ignored is not None:
        ignored.append("context_management")


def _changes_nothing(edit: dict[str, Any], messages: list[Any], max_model_len: int) -> bool:
    kind, keep = edit.get("type"), edit.get("keep")
    keep_value = keep.get("value") if isinstance(keep, dict) else None
    if kind == "clear_thinking_20251015":
        return keep == "all" or _turns_with("thinking", messages) <= _number(keep_value, _KEPT_TURNS)
    if kind not in _TRIGGER_TOKENS:
        return False
    num_uses = sum(1 for block in _blocks(messages) if block.get("type") == "tool_use")
    if kind == "clear_tool_uses_20250919" and num_uses <= _number(keep_value, _KEPT_TOOL_USES):
        return True
    trigger = edit.get("trigger") or {}
    if not isinstance(trigger, dict):
        return False
    if trigger.get("type") == "tool_uses":
        return num_uses < _number(trigger.get("value"), 0)
    # A token has at least one byte.
    num_tokens = min(max_model_len, len(msgspec.json.encode(messages)))
    return num_tokens <= _number(trigger.get("value"), _TRIGGER_TOKENS[kind])


def _blocks(messages: list[Any]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        yield from (block for block in content or () if isinstance(block, dict))


def _turns_with(kind: str, messages: list[Any]) -> int:
    return sum(any(block.get("type") == kind for block in _blocks([message])) for message in messages)


def _number(value: Any, default: int) -> float:
    if value is None:
        return default
    return value if isinstance(value, int | float) and not isinstance(value, bool) else -1


def _refusal(where: str, value: Any) -> RequestError:
    return RequestError(
        f"{where} = {clip(value)} is not supported here and could change the answer: only edits that never trigger in "
        "this conversation are accepted. Shorten the conversation yourself.",
        param=where,
        code="unsupported_parameter",
    )
