"""`Conversation`: what chats, Anthropic's messages and OpenAI's responses have in common, and how it becomes a `Job`.

Each of the three endpoints turns its own wire request into one, so there is one way from messages to a prompt and one
place where the answer's parser, grammar and thinking budget are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.api.job import Answer, Head, Job, common_fields, new_head
from quire.api.protocol import Message, SampledFields, ToolCall, text_of
from quire.api.state import ApiState
from quire.api.tools import OutputPlan, Thinking, ToolUse, output_plan, thinking_budget
from quire.engine.frontend import RenderedChat
from quire.errors import RequestError, clip
from quire.http.wire import parse
from quire.request import SamplingParams

# Arguments of the template that a client may not replace through chat_template_kwargs.
_RESERVED = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
)  # fmt: skip
# Fields of a message that pass to the template as they are.
_PASSED = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_MALFORMED = (msgspec.DecodeError, UnicodeError, RecursionError)
# (head, how the answers are taken apart, with what they are sampled) → the answer
MakeAnswer = Callable[[Head, OutputPlan | None, SamplingParams], Answer]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A checked conversation, as a chat template reads it: contents are strings, arguments of calls are objects."""

    messages: list[dict[str, Any]]
    tools: ToolUse
    variables: Mapping[str, Any]  # arguments of the template (`template_variables`)
    thinking: Thinking
    separate_reasoning: bool = True
    with_reasoning: bool = True

    async def prompt(
        self, state: ApiState, *, add_special_tokens: bool = False, within_context: bool = False
    ) -> RenderedChat:
        """Return the text that the model's template makes, and its token ids.

        ``within_context``: reject at once a text that the context cannot hold.

        Raises:
            RequestError: the template rejects the messages.
            CapacityError: too many conversations wait to be rendered (503).
        """
        messages = self.messages
        template = state.frontend.chat_template
        if template is not None and template.names and "developer" not in template.source():
            # `developer` is OpenAI's newer name of `system`; most templates know the older one alone.
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        # With tool_choice "none" the model is not shown the tools, so that it does not call them.
        tools = list(self.tools.tools) if self.tools.choice != "none" else None
        return await state.frontend.chat_prompt(
            messages,
            tools or None,
            add_special_tokens=add_special_tokens,
            most_tokens=state.model.max_model_len if within_context else None,
            **self.variables,
        )


async def conversation_job(
    state: ApiState,
    request: SampledFields,
    conversation: Conversation,
    sampling: SamplingParams,
    id_prefix: str,
    make_answer: MakeAnswer,
    ignored: list[str] | None,
    **fields: Any,
) -> Job:
    """Render the prompt and choose how its answers are taken apart. ``fields``: of the `Job`, beside the common ones.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    head = new_head(state, id_prefix, request.model)
    fields = common_fields(request, ignored) | fields
    text, prompt = await conversation.prompt(state, within_context=fields["truncate_to"] is None)
    use = conversation.tools
    plan = output_plan(
        state,
        use,
        text,
        separate_reasoning=conversation.separate_reasoning,
        with_reasoning=conversation.with_reasoning,
        skip_special_tokens=sampling.skip_special_tokens,
    )
    if plan is not None:  # the parser reads the special tokens, and hides those that the answer does not show
        form = plan.constrained(use, sampling.structured_outputs)
        sampling = replace(sampling, skip_special_tokens=False, structured_outputs=form)
    budget = thinking_budget(state, conversation.thinking, text, has_tools=bool(use.tools))
    if budget is not None:
        sampling = replace(sampling, thinking_budget=budget)
    return Job(
        [prompt],
        sampling,
        make_answer(head, plan, sampling),
        prompt_text=text,
        continues=bool(conversation.variables.get("continue_final_message")),
        **fields,
    )


def template_variables(
    given: Mapping[str, Any] | None,
    *,
    effort: str | None = None,
    documents: list[dict[str, Any]] | None = None,
    continues: bool | None = None,
    begins: bool | None = None,
) -> dict[str, Any]:
    """Return the arguments of the template. ``given`` is chat_template_kwargs; ``effort`` also says whether to think.

    ``continues`` is continue_final_message, ``begins`` add_generation_prompt.

    Raises:
        RequestError: a reserved name in ``given``, or two fields that contradict each other.
    """
    variables = dict(given or {})
    for name in variables:
        if name in _RESERVED:
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


def template_messages(messages: list[Any], ignored: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the messages of a chat completion as a chat template reads them.

    Raises:
        RequestError: names ``messages[i].…``, the value and what is allowed.
    """
    return [_message(message, f"messages[{i}]", ignored) for i, message in enumerate(messages)]


def _message(raw: Any, where: str, ignored: list[str] | None) -> dict[str, Any]:
    message = parse(Message, raw, prefix=where + ".", ignored=ignored)
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise RequestError(
            f"{where}.content is required: only an assistant message with tool_calls may leave it out.",
            param=where + ".content",
            code="missing_required_parameter",
        )
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{where}.tool_calls is only allowed in an assistant message, not in one of {message.role!r}.",
            param=where + ".tool_calls",
        )
    result: dict[str, Any] = {"role": message.role, "content": None}
    if message.content is not None:
        result["content"] = text_of(message.content, where + ".content", ignored=ignored)
    result |= {name: value for name in _PASSED if (value := getattr(message, name)) is not None}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in calls]
    return result


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    """OpenAI sends arguments as a string of JSON; HF templates expect the object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        shown = f"{where}.function.arguments = {clip(arguments)}"
        try:
            arguments = msgspec.json.decode(arguments.encode() or b"{}")
        except _MALFORMED as error:
            message = f"{shown} is not JSON: {error}."
            raise RequestError(message, param=where + ".function.arguments") from None
        if not isinstance(arguments, dict):
            raise RequestError(f"{shown} must be a JSON object.", param=where + ".function.arguments")
    made = call_message(call.id, call.function.name, arguments)
    if call.id is None:
        del made["id"]
    return made


def call_message(call_id: str | None, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as a chat template reads it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; text that is not one (cut, malformed) stands in it as it is."""
    try:
        value = msgspec.json.decode(text.encode() or b"{}")
    except _MALFORMED:
        value = None
    return value if isinstance(value, dict) else {"malformed_arguments": text}
