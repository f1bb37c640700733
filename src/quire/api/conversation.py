"""`Conversation`: what all dialects of conversations have in common, and how it becomes a `Job`.

Each of them turns its own wire request into one, so there is one way from messages to a prompt and one place where
tools, the answer's parser, its grammar and the thinking budget are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.api.answer_form import ToolUse
from quire.api.fields import RequestFields
from quire.api.history import History, Message
from quire.api.job import Answer, Head, Job, common_fields, new_head
from quire.api.output_plan import OutputPlan, shown_tools, without_calls
from quire.api.state import ApiState
from quire.api.template_input import for_template
from quire.api.thinking import Thinking, thinking_budget
from quire.engine.prompts import RenderedChat
from quire.http.call import Call
from quire.http.wire import parse
from quire.request import SamplingParams

# Every template knows these roles.
_PLAIN_ROLES = frozenset({"system", "user", "assistant"})
_PLAIN_FIELDS = frozenset({"role", "content"})
Messages = list[dict[str, Any]]


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
        tools = shown_tools(state, self.tools) if self.tools.tools else None
        is_plain = tools is None
        for message in messages:
            is_plain = is_plain and message["role"] in _PLAIN_ROLES and "tool_calls" not in message
        if not is_plain:
            messages, tools = for_template(state, messages, tools)
        return await state.frontend.prompts.chat(
            messages,
            tools,
            add_special_tokens=add_special_tokens,
            most_tokens=state.model.max_model_len if within_context else None,
            **self.variables,
        )


def template_messages(messages: list[Any], ignored: list[str] | None = None, sight: Any = None) -> Messages:
    """Return messages in OpenAI's form as a chat template reads them. ``sight``: a `Sight`, if the model takes images.

    Raises:
        RequestError: names ``messages[i].…``, the value and what is allowed.
    """
    result: Messages = []
    history: History | None = None
    for i, raw in enumerate(messages):
        message = parse(Message, raw, prefix=f"messages[{i}].", ignored=ignored)
        is_plain = isinstance(message.content, str) and message.model_fields_set <= _PLAIN_FIELDS
        if is_plain and message.role != "function":
            result.append({"role": message.role, "content": message.content})
            continue
        history = history or History(messages, ignored, sight)
        result.append(history.read(message, i))
    return result


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
    if use.choice == "none":
        sampling = without_calls(state, use, sampling)
    if use.tools or state.reasons:
        plan = OutputPlan.of(
            state,
            use,
            text,
            hide_special=sampling.skip_special_tokens,
            separate_reasoning=conversation.separate_reasoning,
            with_reasoning=conversation.with_reasoning,
        )
    # The parser reads the special tokens, and hides those that the answer does not show.
    if plan is not None:
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
        messages=conversation.messages,
        continues=bool(conversation.variables.get("continue_final_message")),
        **fields,
    )


# (head, how the answers are taken apart, with what they are sampled) → the answer
MakeAnswer = Callable[[Head, OutputPlan | None, SamplingParams], Answer]
