"""How long a model may think: `thinking_token_budget`, and `reasoning_effort` where the template does not know it."""

from __future__ import annotations

from quire.api.state import ApiState
from quire.errors import RequestError
from quire.http.wire import clip
from quire.request import ThinkingBudget
from quire.text.output import OutputFormat, prompt_opening

# Tokens of reasoning at most; "high" and "xhigh" have no limit but max_tokens.
EFFORT_TOKENS = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192}


def thinking_budget(
    state: ApiState, given: int | None, effort: str | None, prompt: str, *, has_tools: bool
) -> ThinkingBudget | None:
    """Return the limit of an answer to ``prompt`` (text), or None where there is none.

    ``given`` tokens are an upper limit: a model that does not reason keeps it. An ``effort`` means nothing to such a
    model, so all but "none" are refused.

    Raises:
        RequestError: the effort cannot be had, or the model's marks of reasoning are no single tokens.
    """
    format = state.output_format(has_tools)
    num_tokens, param = given, "thinking_token_budget"
    if given is None and effort is not None and not _knows_effort(state, has_tools):
        param = "reasoning_effort"
        if format.reasoning is None and not format.harmony and effort != "none":
            raise RequestError(
                f"reasoning_effort = {clip(effort)} is not supported by this model: it does not reason (its chat "
                "template shows no format of reasoning). Leave it out, or send 'none'.",
                param=param,
                code="unsupported_parameter",
            )
        num_tokens = EFFORT_TOKENS.get(effort)
    if num_tokens is None or (format.reasoning is None and not format.harmony):
        return None
    begin_id, end_id = _marks(state, format, param)
    assert format.reasoning is not None
    is_open = prompt_opening(format, prompt) == format.reasoning[0]
    return ThinkingBudget(num_tokens, begin_id, end_id, is_open)


def _knows_effort(state: ApiState, has_tools: bool) -> bool:
    template = state.frontend.chat_template
    return template is not None and bool(template.names) and "reasoning_effort" in template.source(has_tools)


def _marks(state: ApiState, format: OutputFormat, param: str) -> tuple[int, int]:
    """The tokens that begin and end the reasoning. Only a mark that is one token is seen for sure in the ids."""
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
