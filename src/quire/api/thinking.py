"""`Thinking`: how long the model may think, and the limit of tokens that this is."""

from __future__ import annotations

from typing import NamedTuple

from quire.api.state import ApiState
from quire.errors import RequestError
from quire.request import ThinkingBudget
from quire.text.output.formats import OutputFormat, prompt_opening

# Tokens of reasoning at most; "high" and "xhigh" are limited by max_tokens alone.
EFFORT_TOKENS = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192}


class Thinking(NamedTuple):
    """How long the model may think, under the client's names of the two fields."""

    num_tokens: int | None = None
    effort: str | None = None
    tokens_param: str = "thinking_token_budget"
    effort_param: str = "reasoning_effort"


def thinking_budget(
    state: ApiState, thinking: Thinking, prompt: str, ignored: list[str] | None, *, has_tools: bool
) -> ThinkingBudget | None:
    """Return the limit of an answer to ``prompt`` (text), or None if there is none.

    A number of tokens is an upper limit, which a model that does not reason keeps. An effort means nothing to such a
    model: all but "none" are added to ``ignored``. An effort that the template reads is left to the template.

    Raises:
        RequestError: the model's marks of reasoning are not single tokens.
    """
    format = state.output_format(has_tools)
    num_tokens, param = thinking.num_tokens, thinking.tokens_param
    reasons = format.reasons
    if num_tokens is None and thinking.effort is not None and not _reads_effort(state, has_tools):
        param = thinking.effort_param
        if not reasons and thinking.effort != "none" and ignored is not None:
            ignored.append(param)
        num_tokens = EFFORT_TOKENS.get(thinking.effort)
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
    mark_ids = [tokenizer.encode(mark, add_special_tokens=False) for mark in format.reasoning or ()]
    if len(mark_ids) != 2 or any(len(ids) != 1 for ids in mark_ids):
        raise RequestError(
            f"{param} is not supported with the tool format {format.name!r} of this model: its reasoning has no marks "
            "of one token each. Limit the answer with max_tokens.",
            param=param,
            code="unsupported_parameter",
        )
    return mark_ids[0][0], mark_ids[1][0]
