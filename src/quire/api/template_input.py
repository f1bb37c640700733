"""What a chat template is given beside plain messages: tools, calls, other roles, variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.api.state import ApiState
from quire.errors import RequestError
from quire.text.output.generic import with_tools_as_text

# Arguments of the template that a client may not replace through chat_template_kwargs.
RESERVED = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
)  # fmt: skip


_MALFORMED = (msgspec.DecodeError, UnicodeError, RecursionError)


def for_template(
    state: ApiState, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[Sequence[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages and tools in the roles that the model's template knows, or with the tools as text."""
    template = state.frontend.chat_template
    if template.names and "developer" not in template.source():
        # `developer` is OpenAI's newer name of `system`; most templates know the older one alone.
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    if template.names and state.output_format(bool(tools)).asks_in_message:
        messages, tools = with_tools_as_text(messages, tools or [], template.source()), None
    return messages, tools or None


def template_variables(
    kwargs: Mapping[str, Any] | None,
    *,
    effort: str | None = None,
    documents: list[dict[str, Any]] | None = None,
    continues: bool | None = None,
    begins: bool | None = None,
) -> dict[str, Any]:
    """Return the arguments of the template. ``kwargs`` is chat_template_kwargs; ``effort`` also says whether to think.

    ``continues`` is continue_final_message, ``begins`` add_generation_prompt.

    Raises:
        RequestError: a reserved name in ``kwargs``, or two fields that contradict each other.
    """
    variables = dict(kwargs or {})
    for name in variables:
        if name in RESERVED:
            raise RequestError(
                f"chat_template_kwargs.{name} is not allowed: send {name} as a field of the request.",
                param=f"chat_template_kwargs.{name}",
            )
    if effort is not None:
        thinks = effort != "none"
        variables = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **variables}
    if documents:
        variables["documents"] = documents
    if continues and begins:
        raise RequestError(
            "continue_final_message = true and add_generation_prompt = true contradict each other.",
            param="continue_final_message",
        )
    if continues:
        variables |= {"continue_final_message": True, "add_generation_prompt": False}
    elif begins is not None:
        variables["add_generation_prompt"] = begins
    return variables


def call_message(call_id: str | None, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as a chat template reads it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parsed_arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; text that is not one (cut, malformed) stands in it as it is."""
    try:
        value = msgspec.json.decode(text.encode() or b"{}")
        value = {} if value is None else value
    except _MALFORMED:
        value = None
    return value if isinstance(value, dict) else {"malformed_arguments": text}
