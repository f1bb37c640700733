"""The fields of `SamplingParams` that choose among several sequences, checked where one of them is set."""

from __future__ import annotations

from typing import Any

from quire.request import DEFAULTS, MAX_N, SamplingParams, is_int, wrong

# What beam search would have to ignore: accepted as the default alone, and temperature as 0 too.
_NOT_WITH_BEAMS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "min_tokens", "stop", "bad_words", "allowed_token_ids", "prompt_logprobs",
    "structured_outputs", "thinking_budget",
)  # fmt: skip
# The values that beam search accepts of each.
BEAM_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (DEFAULTS[name],) for name in _NOT_WITH_BEAMS},
    "temperature": (0.0, DEFAULTS["temperature"]),
    "logit_bias": ({},),
}


def check_choice(params: SamplingParams) -> None:
    """Check the fields that choose among several sequences, and what they rule out."""
    best_of = params.best_of
    if best_of is not None and not (is_int(best_of) and params.n <= best_of <= MAX_N):
        raise wrong("best_of", best_of, f"an integer in n…{MAX_N}, here {params.n}…{MAX_N}, or null")
    if not isinstance(params.use_beam_search, bool):
        raise wrong("use_beam_search", params.use_beam_search, "true or false")
    early = params.early_stopping
    if not isinstance(early, bool) and early != "never":
        raise wrong("early_stopping", early, "true, false or 'never'")
    if not params.use_beam_search:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(params, name) != neutral:
                raise wrong(name, getattr(params, name), f"{neutral!r} without use_beam_search")
        return
    for name, neutrals in BEAM_NEUTRAL.items():
        if (value := getattr(params, name)) not in neutrals:
            allowed = " or ".join(repr(neutral) for neutral in neutrals)
            raise wrong(name, value, f"{allowed} with use_beam_search")
