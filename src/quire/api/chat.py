"""``/v1/chat/completions``: from the wire to a `Job`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quire.api.chat_choices import ChatChoices
from quire.api.deadline import deadline_of
from quire.api.job import Answer, Job
from quire.api.logprobs import TokenNames
from quire.api.messages import template_messages
from quire.api.protocol import ChatPrompt, ChatRequest, stream_options
from quire.api.replies import ChoicesAnswer, new_head
from quire.api.sampling import sampling_params
from quire.api.state import ApiState
from quire.api.thinking import thinking_budget
from quire.api.tools import OutputPlan, ToolUse, output_plan, tool_use
from quire.engine.prompts import RenderedChat
from quire.errors import RequestError
from quire.http.wire import parse
from quire.request import Deadline, SamplingParams

# What the server itself hands to a template; a client may not replace it through chat_template_kwargs.
_RESERVED_KWARGS = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatWork:
    """A checked chat: what to run, and how its answers are taken apart (``plan`` None: they are plain text)."""

    request: ChatRequest
    model: str  # the name that the answer carries
    text: str  # what the chat template made
    prompt: list[int]
    sampling: SamplingParams
    plan: OutputPlan | None
    deadline: Deadline | None = None

    def job(self, answer: Answer) -> Job:
        request = self.request
        return Job(
            prompts=[self.prompt],
            prompt_text=self.text,
            sampling=self.sampling,
            answer=answer,
            priority=request.priority,
            cache_salt=request.cache_salt,
            tenant=request.user,
            continues=bool(request.continue_final_message),
            client_request_id=request.request_id or request.rid,
            truncate_to=request.truncate_prompt_tokens,
            deadline=self.deadline,
            timing=request.timing,
        )


async def chat_job(state: ApiState, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a chat completion and render its prompt.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(ChatRequest, body, ignored=ignored)
    options = stream_options(request, ignored)
    work = await chat_work(state, request, ignored)
    names = TokenNames(state.frontend.tokenizer, as_ids=request.return_tokens_as_token_ids)
    choices = ChatChoices(
        names,
        with_logprobs=request.logprobs,
        with_ids=request.return_token_ids,
        num_prompt_logprobs=request.prompt_logprobs,
        plan=work.plan,
        new_id=state.new_id,
    )
    head = new_head(state, choices.id_prefix, work.model)
    return work.job(ChoicesAnswer(head, choices, options, work.sampling.n))


async def chat_work(
    state: ApiState, request: ChatRequest, ignored: list[str] | None, *, effort: str | None = None
) -> ChatWork:
    """Check a chat's values and render its prompt; the other endpoints that hold conversations come here too.

    ``effort``: a level that the template has as a variable already (Anthropic's, which does not say whether to think).

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    model = state.check_model(request.model)
    deadline = deadline_of(request.deadline_ms, ignored)
    sampling = sampling_params(
        request,
        state.model.generation_defaults,
        max_tokens=_max_tokens(request),
        logprobs=_num_logprobs(request),
        logprobs_param="top_logprobs",
        ignored=ignored,
    )
    use = tool_use(request.tools, request.tool_choice, request.parallel_tool_calls, ignored)
    text, prompt = await chat_prompt(state, request, ignored, use)
    plan = output_plan(
        state,
        use,
        text,
        separate_reasoning=request.separate_reasoning,
        with_reasoning=request.include_reasoning,
        skip_special_tokens=sampling.skip_special_tokens,
    )
    if plan is not None:  # the parser reads the special tokens, and hides those that the answer does not show
        form = plan.constrained(use, sampling.structured_outputs)
        sampling = replace(sampling, skip_special_tokens=False, structured_outputs=form)
    effort = effort or request.reasoning_effort
    budget = thinking_budget(state, request.thinking_token_budget, effort, text, has_tools=bool(use.tools))
    if budget is not None:
        sampling = replace(sampling, thinking_budget=budget)
    return ChatWork(request, model, text, prompt, sampling, plan, deadline)


async def chat_prompt(
    state: ApiState,
    request: ChatPrompt,
    ignored: list[str] | None,
    use: ToolUse,
    *,
    add_special_tokens: bool = False,
) -> RenderedChat:
    """Return what the model's template makes of the messages, as text and as token ids.

    Raises:
        RequestError: a message that is wrong, or that the template rejects.
        CapacityError: too many conversations wait to be rendered (503).
    """
    messages = template_messages(request.messages, ignored)
    _name_developers(state, messages)
    # With tool_choice "none" the model is not shown the tools, so that it does not call them.
    tools = list(use.tools) if use.choice != "none" else None
    return await state.frontend.chat_prompt(
        messages, tools or None, add_special_tokens=add_special_tokens, **_template_kwargs(request)
    )


def _name_developers(state: ApiState, messages: list[dict[str, Any]]) -> None:
    """`developer` is OpenAI's newer name of `system`; most templates know the older one alone."""
    template = state.frontend.chat_template
    if template is not None and template.names and "developer" not in template.source():
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"


def _max_tokens(request: ChatRequest) -> int | None:
    """``max_completion_tokens``, or its older name; None is the rest of the context."""
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_completion_tokens = {new} and max_tokens = {old} contradict each other: send one of them.",
            param="max_completion_tokens",
        )
    if new is not None and new < 1:
        raise RequestError(
            f"max_completion_tokens = {new} is not allowed: it must be an integer ≥ 1, or null.",
            param="max_completion_tokens",
        )
    return new if new is not None else old


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError(
            f"top_logprobs = {request.top_logprobs} is only allowed with logprobs = true.",
            param="top_logprobs",
        )
    return None


def _template_kwargs(request: ChatPrompt) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    for name, value in (request.chat_template_kwargs or {}).items():
        if name in _RESERVED_KWARGS:
            raise RequestError(
                f"chat_template_kwargs.{name} is not allowed: send {name} as a field of the request.",
                param=f"chat_template_kwargs.{name}",
            )
        kwargs[name] = value
    effort = getattr(request, "reasoning_effort", None)
    if effort is not None:
        kwargs.setdefault("reasoning_effort", effort)
        kwargs.setdefault("enable_thinking", effort != "none")
        kwargs.setdefault("thinking", effort != "none")
    if request.documents:
        kwargs["documents"] = request.documents
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise RequestError(
                "continue_final_message = true and add_generation_prompt = true contradict each other.",
                param="continue_final_message",
            )
        kwargs["continue_final_message"] = True
        kwargs["add_generation_prompt"] = False
    elif request.add_generation_prompt is not None:
        kwargs["add_generation_prompt"] = request.add_generation_prompt
    return kwargs
