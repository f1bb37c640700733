"""``/v1/completions``: from the wire to a `Job`."""

from __future__ import annotations

from typing import Any

from quire.api.deadline import deadline_of
from quire.api.job import Job
from quire.api.logprobs import TokenNames
from quire.api.protocol import CompletionRequest, stream_options
from quire.api.replies import ChoicesAnswer, CompletionChoices, new_head
from quire.api.sampling import sampling_params
from quire.api.state import ApiState
from quire.errors import RequestError
from quire.http.wire import clip, parse

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completion_job(state: ApiState, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a text completion.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(CompletionRequest, body, ignored=ignored)
    model = state.check_model(request.model)
    options = stream_options(request, ignored)
    prompts = parse_prompts(request.prompt)
    if not request.add_special_tokens:
        tokenize = state.frontend.tokenize
        prompts = [await tokenize(p, add_special_tokens=False) if isinstance(p, str) else p for p in prompts]
    defaults = state.model.generation_defaults
    max_tokens = request.max_tokens if request.max_tokens is not None else DEFAULT_MAX_TOKENS
    sampling = sampling_params(
        _echoing(request),
        defaults,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        logprobs_param="logprobs",
        ignored=ignored,
    )
    names = TokenNames(state.frontend.tokenizer, as_ids=request.return_tokens_as_token_ids)
    choices = CompletionChoices(
        names,
        num_logprobs=request.logprobs,
        with_ids=request.return_token_ids,
        num_prompt_logprobs=request.prompt_logprobs,
        echo=request.echo,
    )
    return Job(
        prompts=prompts,
        sampling=sampling,
        answer=ChoicesAnswer(new_head(state, choices.id_prefix, model), choices, options, sampling.n),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.user,
        continues=True,
        client_request_id=request.request_id or request.rid,
        truncate_to=request.truncate_prompt_tokens,
        deadline=deadline_of(request.deadline_ms, ignored),
        timing=request.timing,
        echo=request.echo,
    )


def _echoing(request: CompletionRequest) -> CompletionRequest:
    """An echo with log-probabilities, or of the prompt alone (max_tokens = 0), needs those of the prompt."""
    if not request.echo or (request.logprobs is None and request.max_tokens != 0):
        return request
    most = max(request.logprobs or 0, request.prompt_logprobs or 0)
    return request.model_copy(update={"prompt_logprobs": most})


def parse_prompts(prompt: Any, param: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a string, a list of ids, or a list of either. ``param``: what the client calls them.

    Raises:
        RequestError: any other shape, by the first wrong element.
    """
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None:
        raise RequestError(
            f"{param} is required: it must be a string, a list of token ids, or a list of either.",
            param=param,
            code="missing_required_parameter",
        )
    if not isinstance(prompt, list) or not prompt:
        raise _wrong(param, prompt, "a string, a list of token ids, or a list of either, not empty")
    if _is_id(prompt[0]):
        return [_ids(param, prompt)]
    prompts: list[str | list[int]] = []
    for i, item in enumerate(prompt):
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list) and item:
            prompts.append(_ids(f"{param}[{i}]", item))
        else:
            raise _wrong(f"{param}[{i}]", item, "a string or a list of token ids, not empty")
    return prompts


def _ids(where: str, items: list[Any]) -> list[int]:
    for i, item in enumerate(items):
        if not _is_id(item):
            raise _wrong(f"{where}[{i}]", item, "a token id (an integer ≥ 0), like the elements before it")
    return items


def _is_id(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _wrong(where: str, value: Any, allowed: str) -> RequestError:
    return RequestError(
        f"{where} = {clip(value)} is not allowed: it must be {allowed}.", param=where, code="invalid_type"
    )
