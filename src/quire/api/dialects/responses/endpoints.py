"""OpenAI's ``/v1/responses``: jobs, and what is stored of their answers."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.api.context_management import check_compaction
from quire.api.conversation import Conversation, conversation_job
from quire.api.dialects.responses.answer import ResponseAnswer, TextLogprobs
from quire.api.dialects.responses.request import (
    INCLUDED,
    ResponsesRequest,
    add_input,
    input_items,
    output_form,
    read_conversation,
)
from quire.api.dialects.responses.store import Stored
from quire.api.dialects.responses.stored import pending_response
from quire.api.dialects.responses.tools import ResponseTools
from quire.api.history_parts import sight_of
from quire.api.job import Answer, Head, Job, given_sampling, sampling_params, served_name
from quire.api.output_plan import OutputPlan
from quire.api.state import ApiState
from quire.api.token_logprobs import TokenNames
from quire.engine.prompts import off_loop
from quire.errors import RequestError, clip
from quire.http.call import Call
from quire.http.wire import parse
from quire.request import SamplingParams
from quire.structured_outputs import StructuredOutputsParams


async def responses_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a response and render its prompt.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = _without_references(state, call, parse(ResponsesRequest, body, ignored=ignored))
    if request.background and (request.stream or not request.store):
        other = "stream = true" if request.stream else "store = false"
        raise RequestError(
            f"background = true and {other} contradict each other: it is fetched from the store, with GET "
            "/v1/responses/{id}.",
            param="background",
        )
    served_name(state, request.model)
    num_logprobs = _num_logprobs(request)
    messages, conversation = await _conversation(state, call, request, ignored)
    for grammar in conversation.tools.grammars.values():
        # Checked by itself, so that an error names it.
        if grammar.lark is not None:
            await state.frontend.check_form(
                StructuredOutputsParams(grammar=grammar.lark, param=grammar.param)
            )
    sampling = sampling_params(
        given_sampling(request),
        state.model.generation_defaults,
        max_tokens=request.max_output_tokens,
        logprobs=num_logprobs,
        form=output_form(request, ignored),
        client_names={"logprobs": "top_logprobs"},
    )
    items = input_items(request.input, state.new_id)

    def store(response: dict[str, Any]) -> None:
        if request.store:
            add_input(messages, response["output"])
            stored = Stored(*map(msgspec.json.encode, (response, items, messages)))
            state.responses.put(call.tenant, response["id"], stored, durable=request.background)

    def answer(head: Head, plan: OutputPlan | None, sampling: SamplingParams) -> Answer:
        tokenizer = state.frontend.tokenizer
        names = TokenNames(tokenizer, as_ids=False) if num_logprobs is not None else None
        return ResponseAnswer(
            state,
            head,
            plan,
            _echoed(request, sampling),
            store,
            items,
            TextLogprobs(names, plan, tokenizer, skip_special_tokens=sampling.skip_special_tokens),
            ResponseTools.of(request.tools or ()),
            streamed=request.stream or request.background,
        )

    background = request.background
    return await conversation_job(
        state, call, request, conversation, sampling, "resp_", answer, ignored, in_background=background
    )


async def count_input(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> dict[str, Any]:
    """Return ``{object, input_tokens}``: the length of the prompt that the same fields make in ``/v1/responses``.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = _without_references(state, call, parse(ResponsesRequest, body, ignored=ignored))
    served_name(state, request.model)
    output_form(request, ignored)
    _, conversation = await _conversation(state, call, request, ignored)
    _, prompt = await conversation.prompt(state)
    return {"object": "response.input_tokens", "input_tokens": len(prompt)}


async def _conversation(
    state: ApiState, call: Call, request: ResponsesRequest, ignored: list[str] | None
) -> tuple[list[dict[str, Any]], Conversation]:
    """Return the messages of the earlier turns and the input, and the conversation that they make."""
    check_compaction(request.context_management, state.model.max_model_len, ignored)
    size = 0 if isinstance(request.input, str) else len(request.input)
    messages = await off_loop(size, _messages, state, call, request, ignored)
    return messages, read_conversation(request, messages, ignored)


def _without_references(state: ApiState, call: Call, request: ResponsesRequest) -> ResponsesRequest:
    """Return the request with stored items in place of the references to them.

    Raises:
        RequestError: an item is not stored.
    """
    if isinstance(request.input, str):
        return request
    items = list(request.input)
    for i, item in enumerate(items):
        if not isinstance(item, dict) or "id" not in item or item.get("type") != "item_reference":
            continue
        stored = state.responses.item(call.tenant, str(item["id"])) if item["id"] else None
        if stored is None:
            raise RequestError(
                f"input[{i}].id = {clip(item['id'])} is not an item of a response stored here (--response-store-mib): "
                "send the item itself.",
                param=f"input[{i}]",
            )
        items[i] = stored
    return request.model_copy(update={"input": items})


def _messages(
    state: ApiState, call: Call, request: ResponsesRequest, ignored: list[str] | None
) -> list[dict[str, Any]]:
    """Return the messages of the earlier turns and of the request's input."""
    messages, sight = _before(state, call, request.previous_response_id), sight_of(state, call, request)
    if sight is not None:
        messages = sight.restored(messages)
    add_input(messages, request.input, ignored, sight)
    if not messages:
        raise RequestError("input = [] is not allowed without previous_response_id.", param="input")
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # reasoning alone
    return messages


def _before(state: ApiState, call: Call, previous: str | None) -> list[dict[str, Any]]:
    """Return the conversation that ``previous_response_id`` ends."""
    if previous is None:
        return []
    stored = state.responses.get(call.tenant, previous)
    if stored is None and pending_response(state, call, previous) is not None:
        raise RequestError(
            f"previous_response_id = {clip(previous)} is not complete yet: wait until it is.",
            param="previous_response_id",
        )
    if stored is None:
        raise RequestError(
            f"previous_response_id = {clip(previous)} is not stored here: it was not stored, was deleted, or made room "
            "for newer ones (--response-store-mib). Send the whole conversation as input.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored.conversation()


def _num_logprobs(request: ResponsesRequest) -> int | None:
    """Check ``include`` and ``top_logprobs``; None if no log-probabilities are asked for."""
    included = request.include or []
    for i, name in enumerate(included):
        if name not in INCLUDED:
            raise RequestError(
                f"include[{i}] = {clip(name)} is not supported: only {INCLUDED[0]!r} is.",
                param=f"include[{i}]",
            )
    if INCLUDED[0] in included:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError(
            f"top_logprobs = {clip(request.top_logprobs)} is only allowed with include = [{INCLUDED[0]!r}].",
            param="top_logprobs",
        )
    return None


def _echoed(request: ResponsesRequest, sampling: SamplingParams) -> dict[str, Any]:
    """Return the fields of the request that the response repeats, with the values in force."""
    text, reasoning = request.text or {}, request.reasoning or {}
    return {
        "background": request.background,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "store": request.store,
        "metadata": request.metadata or {},
        "tools": request.tools or [],
        "tool_choice": request.tool_choice or "auto",
        "parallel_tool_calls": request.parallel_tool_calls,
        "text": {"format": text.get("format") or {"type": "text"}},
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "max_output_tokens": request.max_output_tokens,
        "top_logprobs": request.top_logprobs or 0,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "user": request.user or None,
    }
