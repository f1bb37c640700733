"""``/v1/chat/completions``: from wire and messages to a `Job`; its choices with content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec

from quire.api.answer_form import NO_TOOLS, chat_tools, structured_outputs, tool_use
from quire.api.conversation import Conversation, conversation_job, template_messages
from quire.api.dialects.openai.choices import ChatChoices, ChoicesAnswer
from quire.api.dialects.openai.fields import TEMPLATE_FIELDS, ChatPrompt, ChatRequest
from quire.api.fields import FORM_FIELDS, REST_OF_CONTEXT
from quire.api.history import PARTS
from quire.api.job import Answer, Head, Job, given_sampling, sampling_params, served_name, stream_options
from quire.api.output_plan import OutputPlan
from quire.api.state import ApiState
from quire.api.template_input import template_variables
from quire.api.thinking import Thinking
from quire.api.token_logprobs import TokenNames
from quire.engine.prompts import off_loop
from quire.errors import RequestError, clip
from quire.http.call import Call
from quire.http.wire import not_allowed, parse
from quire.request import SamplingParams

NO_VARIABLES: Mapping[str, Any] = {}
_encode = msgspec.json.Encoder().encode


async def chat_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a chat completion and render its prompt.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(ChatRequest, body, ignored=ignored)
    options = stream_options(request, ignored)
    served_name(state, request.model)
    sampling = sampling_params(
        given_sampling(request),
        state.model.generation_defaults,
        max_tokens=_max_tokens(request),
        logprobs=_num_logprobs(request) if request.logprobs or request.top_logprobs else None,
        form=None
        if request.model_fields_set.isdisjoint(FORM_FIELDS)
        else structured_outputs(request, ignored),
        client_names={"logprobs": "top_logprobs"},
    )

    def answer(head: Head, plan: OutputPlan | None, sampling: SamplingParams) -> Answer:
        choices = ChatChoices(
            TokenNames(state.frontend.tokenizer, as_ids=request.return_tokens_as_token_ids),
            with_logprobs=bool(request.logprobs),
            with_ids=request.return_token_ids,
            num_prompt_logprobs=request.prompt_logprobs,
            plan=plan,
            head=head,
        )
        return ChoicesAnswer(head, choices, options, sampling.n)

    sight = None if state.model.vision is None else import_module(PARTS).sight_of(state, call, request)
    conversation = await off_loop(len(request.messages), chat_conversation, request, ignored, request, sight)
    return await conversation_job(state, call, request, conversation, sampling, "chatcmpl-", answer, ignored)


def chat_conversation(
    request: ChatPrompt, ignored: list[str] | None, chat: ChatRequest | None = None, sight: Any = None
) -> Conversation:
    """Return the conversation of a chat prompt. ``chat``: the same, if it is a whole chat completion.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    effort = chat.reasoning_effort if chat else None
    choice, parallel = (chat.tool_choice, chat.parallel_tool_calls) if chat else (None, None)
    use, variables = NO_TOOLS, NO_VARIABLES
    if request.tools or choice is not None:
        use = tool_use(chat_tools(request.tools, ignored), choice, parallel, function=".function")
    if not request.model_fields_set.isdisjoint(TEMPLATE_FIELDS):
        variables = template_variables(
            request.chat_template_kwargs,
            effort=effort,
            documents=request.documents,
            continues=request.continue_final_message,
            begins=request.add_generation_prompt,
        )
    return Conversation(
        template_messages(request.messages, ignored, sight),
        use,
        variables,
        Thinking(chat.thinking_token_budget if chat else None, effort),
        separate_reasoning=chat is None or chat.separate_reasoning,
        with_reasoning=chat is None or chat.include_reasoning,
    )


def _max_tokens(request: ChatRequest) -> int | None:
    """``max_completion_tokens``, or its older name; None is the rest of the context."""
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_completion_tokens = {clip(new)} and max_tokens = {clip(old)} contradict each other: "
            "send one of them.",
            param="max_completion_tokens",
        )
    if new is not None and new < 1 and new != REST_OF_CONTEXT:
        raise not_allowed(
            "max_completion_tokens", new, "an integer ≥ 1, or null or -1 for the rest of the context"
        )
    limit = new if new is not None else old
    return None if limit == REST_OF_CONTEXT else limit


def _num_logprobs(request: ChatRequest) -> int:
    """An integer is the completions' form of the field: that many alternatives, and 0 is false."""
    if request.logprobs:
        top = None if request.logprobs is True else request.logprobs
        return request.top_logprobs if request.top_logprobs is not None else top or 0
    raise RequestError(
        f"top_logprobs = {clip(request.top_logprobs)} is only allowed with logprobs = true.",
        param="top_logprobs",
    )
