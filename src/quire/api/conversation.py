"""`Conversation`: what chats, Anthropic's messages and OpenAI's responses have in common, and how it becomes a `Job`.

Each of the three endpoints turns its own wire request into one, so there is one way from messages to a prompt and one
place where tools, the answer's parser, its grammar and the thinking budget are chosen.

"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from quire.api.answer_form import ToolUse
from quire.api.job import Answer, Head, Job, common_fields, new_head
from quire.api.protocol import RequestFields
from quire.api.state import ApiState
from quire.engine.prompts import RenderedChat
from quire.errors import RequestError, clip
from quire.http.call import Call
from quire.request import SamplingParams, ThinkingBudget
from quire.structured_outputs import StructuredOutputsParams
from quire.text.output.call_grammar import after_reasoning, calls_in_text, form_of, required_calls
from quire.text.output.formats import OutputFormat, prompt_opening
from quire.text.output.generic import asked
from quire.text.output.parser import OutputParser

# Arguments of the template that a client may not replace through chat_template_kwargs.
RESERVED = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
)  # fmt: skip
# Every template knows these roles.
_PLAIN_ROLES = frozenset({"system", "user", "assistant"})
_MALFORMED = (msgspec.DecodeError, UnicodeError, RecursionError)


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
        messages: Sequence[dict[str, Any]] = self.messages
        # With tool_choice "none" the model is not shown the tools, so that it does not call them.
        tools = list(self.tools.tools) if self.tools.tools and self.tools.choice != "none" else None
        is_plain = tools is None
        for message in messages:
            is_plain = is_plain and message["role"] in _PLAIN_ROLES and "tool_calls" not in message
        if not is_plain:
            messages, tools = _for_template(state, messages, tools)
        return await state.frontend.prompts.chat(
            messages,
            tools,
            add_special_tokens=add_special_tokens,
            most_tokens=state.model.max_model_len if within_context else None,
            **self.variables,
        )

    def output_plan(self, state: ApiState, prompt: str, *, hide_special: bool) -> OutputPlan | None:
        """Return how the answer to ``prompt`` (text) is taken apart; None if it is plain text.

        Raises:
            RequestError: there are tools, and the chosen format has no calls.
        """
        use = self.tools
        format = state.output_format(bool(use.tools))
        if use.schemas and not format.calls_tools:
            raise RequestError(
                f"tools are not supported with --tool-format {format.name}, which has no calls. Start the server with "
                "another one, or send tool_choice = 'none'.",
                param="tools",
            )
        if not use.schemas and format.calls is not None:  # only reasoning is separated
            format = replace(format, opens=(), closes=(), calls=None, bare="")
        if not self.separate_reasoning:
            format = replace(format, reasoning=None)
        if not format.calls_tools and not format.reasons:
            return None
        hidden = state.frontend.tokenizer.special_texts if hide_special else ()
        opening, max_calls = prompt_opening(format, prompt), None if use.parallel else 1
        return OutputPlan(
            format, use.schemas, opening, hidden, self.with_reasoning, max_calls, bool(use.required)
        )


async def conversation_job(
    state: ApiState,
    call: Call,
    request: RequestFields,
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
    head = new_head(state, call, id_prefix, request.model)
    fields = common_fields(request, call, ignored) | fields
    text, prompt = await conversation.prompt(state, within_context=fields["truncate_to"] is None)
    use = conversation.tools
    plan = None
    if use.tools or state.reasons:
        plan = conversation.output_plan(state, text, hide_special=sampling.skip_special_tokens)
    if plan is not None:  # the parser reads the special tokens, and hides those that the answer does not show
        form = plan.constrained(use, sampling.structured_outputs)
        sampling = replace(sampling, skip_special_tokens=False, structured_outputs=form)
        plan = replace(plan, unmarked=bool(use.schemas) and form is None)
        fields = {**fields, "notes": plan.notes}
    thinking = conversation.thinking
    if thinking.num_tokens is not None or thinking.effort is not None:
        budget = thinking_budget(state, thinking, text, ignored, has_tools=bool(use.tools))
        sampling = replace(sampling, thinking_budget=budget)
    return Job(
        [prompt],
        sampling,
        make_answer(head, plan, sampling),
        prompt_text=text,
        continues=bool(conversation.variables.get("continue_final_message")),
        **fields,
    )


def _for_template(
    state: ApiState, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[Sequence[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages and tools in the roles that the model's template knows, or with the tools as text."""
    template = state.frontend.chat_template
    if template.names and "developer" not in template.source():
        # `developer` is OpenAI's newer name of `system`; most templates know the older one alone.
        messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
    if template.names and state.output_format(bool(tools)).asked:
        messages, tools = asked(messages, tools or [], template.source()), None
    return messages, tools or None


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


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; text that is not one (cut, malformed) stands in it as it is."""
    try:
        value = msgspec.json.decode(text.encode() or b"{}")
        value = {} if value is None else value
    except _MALFORMED:
        value = None
    return value if isinstance(value, dict) else {"malformed_arguments": text}


# Tokens of reasoning at most; "high" and "xhigh" are limited by max_tokens alone.
EFFORT_TOKENS = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192}


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the answers of one request are taken apart; `parser` makes a parser for each of them."""

    format: OutputFormat
    schemas: Mapping[str, Mapping[str, Any]]
    opening: str
    hidden: tuple[str, ...]
    with_reasoning: bool = True  # False: the answer leaves it out
    max_calls: int | None = None  # 1 with parallel_tool_calls = false
    required: bool = False  # the answer is calls alone
    unmarked: bool = False  # calls may lack the format's mark
    # What `timing` says of the answer, once it is known.
    notes: dict[str, Any] = field(default_factory=dict)

    def constrained(
        self, use: ToolUse, form: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """Return the form of the whole answer: the reasoning, then the calls that ``use`` requires, or ``form``.

        Where the model decides and a tool has a grammar, the form is text with calls that keep to it.

        Raises:
            RequestError: both a call and a form are required, or this format's calls cannot be required.
        """
        part: dict[str, Any] | None = None
        param = "tool_choice" if form is None else form.param
        in_reasoning = self.format.reasoning is not None and self.opening == self.format.reasoning[0]
        if use.required:
            # The form is that of an answer without calls, in a later turn.
            param = "tool_choice"
            part = required_calls(self.format, use.enforced, use.required, parallel=use.parallel)
            if part is None:
                raise RequestError(
                    f"tool_choice = {clip(use.choice)} is not supported with the tool format {self.format.name!r} of "
                    "this model; 'auto' and 'none' are.",
                    param="tool_choice",
                )
        elif form is None and use.grammars and (part := calls_in_text(self.format, use.enforced)) is not None:
            param = next(iter(use.grammars.values())).param
        elif form is None or not in_reasoning:
            return form
        else:
            part = form_of(form.kind, getattr(form, form.kind))
            if part is None:
                return form
        if in_reasoning:
            part = after_reasoning(self.format, part)
        to_the_letter = None if use.required or form is None else form.disable_additional_properties
        return StructuredOutputsParams(
            structural_tag={"format": part}, param=param, disable_additional_properties=to_the_letter
        )

    def parser(self) -> OutputParser:
        return OutputParser(
            self.format, self.schemas, opening=self.opening, hidden=self.hidden, unmarked=self.unmarked
        )


# (head, how the answers are taken apart, with what they are sampled) → the answer
MakeAnswer = Callable[[Head, OutputPlan | None, SamplingParams], Answer]


@dataclass(frozen=True, slots=True)
class Thinking:
    """How long the model may think, under the client's names of the two fields."""

    num_tokens: int | None = None
    effort: str | None = None
    tokens_param: str = "thinking_token_budget"
    effort_param: str = "reasoning_effort"


def thinking_budget(
    state: ApiState, asked: Thinking, prompt: str, ignored: list[str] | None, *, has_tools: bool
) -> ThinkingBudget | None:
    """Return the limit of an answer to ``prompt`` (text), or None if there is none.

    A number of tokens is an upper limit, which a model that does not reason keeps. An effort means nothing to such a
    model: all but "none" are added to ``ignored``. An effort that the template reads is left to the template.

    Raises:
        RequestError: the model's marks of reasoning are not single tokens.
    """
    format = state.output_format(has_tools)
    num_tokens, param = asked.num_tokens, asked.tokens_param
    reasons = format.reasons
    if num_tokens is None and asked.effort is not None and not _reads_effort(state, has_tools):
        param = asked.effort_param
        if not reasons and asked.effort != "none" and ignored is not None:
            ignored.append(param)
        num_tokens = EFFORT_TOKENS.get(asked.effort)
    if num_tokens is None or not reasons:
        return None
    begin_id, end_id = _marks(state, format, param)
    assert format.reasoning is not None
    is_open = prompt_opening(format, prompt) == format.reasoning[0]
    return ThinkingBudget(num_tokens, begin_id, end_id, is_open)


def _reads_effort(state: ApiState, has_tools: bool) -> bool:
    template = state.frontend.chat_template
    return bool(template.names) and "reasoning_effort" in template.source(has_tools)


def _marks(state: ApiState, format: OutputFormat, param: str) -> tuple[int, int]:
    """Return the tokens that begin and end the reasoning. Only marks of one token can be found reliably in the ids."""
    tokenizer = state.frontend.tokenizer
    found = [tokenizer.encode(mark, add_special_tokens=False) for mark in format.reasoning or ()]
    if len(found) != 2 or any(len(ids) != 1 for ids in found):
        raise RequestError(
            f"{param} is not supported with the tool format {format.name!r} of this model: its reasoning has no marks "
            "of one token each. Limit the answer with max_tokens.",
            param=param,
            code="unsupported_parameter",
        )
    return found[0][0], found[1][0]
