"""From the wire's sampling fields and the model's defaults to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.api.protocol import GenerationFields
from quire.api.structured import structured_outputs
from quire.errors import RequestError
from quire.http.wire import clip
from quire.request import SamplingParams

# Taken over under the same name where the request gives them.
_SAME_NAME = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "bad_words", "allowed_token_ids", "skip_special_tokens", "prompt_logprobs", "use_beam_search", "length_penalty",
    "early_stopping",
)  # fmt: skip


def sampling_params(
    request: GenerationFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    logprobs_param: str,
    ignored: list[str] | None = None,
) -> SamplingParams:
    """Build `SamplingParams`: the request's values, else the model's ``defaults``, else the fields' own.

    ``max_tokens`` None means the rest of the context. ``logprobs_param`` is what the client calls `logprobs`.
    ``ignored`` collects unknown names, as in `parse`.

    Raises:
        RequestError: a value out of range, named as the client named it.
    """
    if request.use_beam_search:
        defaults = {}  # beams are not drawn: only what the request itself asks for is in their way
    elif request.stream and (request.best_of or 0) > (request.n or 1):
        raise RequestError(
            f"best_of = {request.best_of} is not allowed with stream = true: the best answers are known at the end.",
            param="best_of",
        )
    values = {name: value for name, value in defaults.items() if name in _SAME_NAME}
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    if request.logit_bias is not None:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    try:
        form = structured_outputs(request, ignored)
        return SamplingParams(**values, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=form)
    except RequestError as error:
        if error.param == "logprobs" and logprobs_param != "logprobs":
            message = str(error).replace("logprobs", logprobs_param, 1)
            raise RequestError(message, param=logprobs_param, code=error.code) from None
        raise


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit()):
            raise RequestError(
                f"logit_bias has the key {clip(key)}: keys must be token ids (integers ≥ 0) as strings.",
                param="logit_bias",
            )
        result[int(key)] = value
    return result
