"""``/v1/responses/{id}/input_items``: the input of a response as items that have an id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def input_items(given: str | list[Any], new_id: Callable[[], str]) -> list[dict[str, Any]]:
    """Return the checked ``input`` of a request (not what came before it) as items, texts as parts."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_item(item, new_id) for item in given]


def _item(item: dict[str, Any], new_id: Callable[[], str]) -> dict[str, Any]:
    kind = item.get("type", "message")
    named = {"type": kind, **item}
    if not named.get("id"):
        named["id"] = _PREFIXES[kind] + new_id()
    named.setdefault("status", "completed")
    if kind == "message" and isinstance(named["content"], str):
        part = "output_text" if named["role"] == "assistant" else "input_text"
        named["content"] = [{"type": part, "text": named["content"]}]
    return named
