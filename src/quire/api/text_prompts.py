"""Prompts that are texts or token ids: their shapes, and the text between two others."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.api.state import ApiState
from quire.errors import RequestError
from quire.http.wire import not_allowed
from quire.request import SamplingParams
from quire.text.infill import find_infill, infill_lead


async def filled_in(
    state: ApiState, prompts: Sequence[str | Sequence[int]], suffix: str, sampling: SamplingParams
) -> tuple[list[str | Sequence[int]], SamplingParams]:
    """Return the prompts that ask for the text between each of ``prompts`` and ``suffix``, and where it ends.

    Raises:
        RequestError: the model was not trained for it.
    """
    tokenizer, tokenize = state.frontend.tokenizer, state.frontend.prompts.tokenize
    infill = find_infill(tokenizer)
    if infill is None:
        raise RequestError(
            "suffix is not supported by this model: its vocabulary has no tokens for filling in the middle. Leave it "
            "out, or serve a model for code.",
            param="suffix",
            code="unsupported_parameter",
        )
    most, lead = state.model.max_model_len, infill_lead(tokenizer)
    behind = await tokenize(lead + suffix, add_special_tokens=False, most_tokens=most)
    behind = behind[len(tokenizer.encode(lead, add_special_tokens=False)) :]
    made: list[str | Sequence[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = await tokenize(prompt, add_special_tokens=False, most_tokens=most)
        made.append(infill.prompt(tokenizer, prompt, behind))
    return made, replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *infill.end_ids))


async def parse_prompts(
    state: ApiState, prompt: Any, param: str = "prompt", *, add_special_tokens: bool = True
) -> list[str | Sequence[int]]:
    """Return the prompts of a string, a list of ids, or a list of either. ``param``: the client's name of the field.

    A long list of ids may be an array.

    Raises:
        RequestError: any other shape; names the first wrong element.
    """
    if prompt is None:
        raise RequestError(
            f"{param} is required: it must be a string, a list of token ids, or a list of either.",
            param=param,
            code="missing_required_parameter",
        )
    if not isinstance(prompt, str | array) and (not isinstance(prompt, list) or not prompt):
        allowed = "a string, a list of token ids, or a list of either, not empty"
        raise not_allowed(param, prompt, allowed, "invalid_type")
    prompts: list[str | Sequence[int]] = []
    if isinstance(prompt, str | array):
        prompts = [prompt]
    elif _is_id(prompt[0]):
        prompts = [_ids(param, prompt)]
    else:
        prompts = [_prompt(f"{param}[{i}]", item) for i, item in enumerate(prompt)]
    if add_special_tokens:
        return prompts
    tokenize = state.frontend.prompts.tokenize
    return [await tokenize(p, add_special_tokens=False) if isinstance(p, str) else p for p in prompts]


def _prompt(where: str, item: Any) -> str | Sequence[int]:
    if isinstance(item, str | array):
        return item
    if isinstance(item, list) and item:
        return _ids(where, item)
    raise not_allowed(where, item, "a string or a list of token ids, not empty", "invalid_type")


def _ids(where: str, items: list[Any]) -> list[int]:
    if float in set(map(type, items)):  # clients whose numbers are all of one type write 119.0
        items = [int(item) if isinstance(item, float) and item.is_integer() else item for item in items]
    for i, item in enumerate(items):
        if not _is_id(item):
            allowed = "a token id (an integer ≥ 0), like the elements before it"
            raise not_allowed(f"{where}[{i}]", item, allowed, "invalid_type")
    return items


def _is_id(item: Any) -> bool:
    return (isinstance(item, int) and not isinstance(item, bool)) or (
        isinstance(item, float) and item.is_integer()
    )
