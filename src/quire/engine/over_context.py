"""The error of a request whose prompt and output are longer than the model's context, with the three numbers."""

from __future__ import annotations

from quire.engine.prompts import too_long
from quire.errors import RequestError
from quire.request import SamplingParams


def over_context(
    num_prompt_tokens: int, sampling: SamplingParams, limit: int, *, prompt_only: bool
) -> RequestError:
    """Return the error. ``prompt_only``: nothing is sampled."""
    room, wanted = limit - num_prompt_tokens, sampling.max_tokens
    if prompt_only or wanted == 0:
        return too_long(str(num_prompt_tokens), limit)
    has, context = (
        f"The prompt has {num_prompt_tokens} tokens",
        f"the context of this model is {limit} tokens",
    )
    param = "max_tokens"
    if room < 1:
        param, shown = "prompt", "not set" if wanted is None else wanted
        text = f"{has} and max_tokens is {shown}, but {context}: shorten the prompt to at most {limit - 1}."
    elif wanted is None:
        param, least = (
            "min_tokens",
            f"min_tokens = {sampling.min_tokens} with a prompt of {num_prompt_tokens} tokens",
        )
        text = f"{least} is more than the context of this model, {limit} tokens: ask for at most {room}."
    else:
        together = f"max_tokens is {wanted}, together {num_prompt_tokens + wanted}"
        text = f"{has} and {together}, but {context}: shorten the prompt, or ask for at most {room}."
    return RequestError(text, param=param, code="context_length_exceeded")
