"""``generation_config.json``: the sampling of requests that say nothing, and the ids that end an answer.

It only sets defaults, so no value in it stops a load. A value that no request may have, and a setting that Quire does
not apply, is left out and named in a line. ``max_new_tokens`` is not read: no API has such a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError, clip
from quire.request import SamplingParams

# Settings of transformers that would change the tokens and are not applied → the values that change nothing.
_NOT_APPLIED: Mapping[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],), "begin_suppress_tokens": ([],), "suppress_tokens": ([],), "sequence_bias": ({}, []),
    "forced_bos_token_id": (), "forced_eos_token_id": (), "exponential_decay_length_penalty": (),
    "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1.0,),
    "min_length": (0,), "min_new_tokens": (0,), "num_beams": (1,), "penalty_alpha": (0, 0.0), "top_h": (),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "guidance_scale": (1.0,), "stop_strings": ([], ""),
    "watermarking_config": (), "dola_layers": (),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Defaults of ``generation_config.json``; None where it has no such field, or one that no request may have."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None


def read_generation(
    values: Mapping[str, Any], where: str
) -> tuple[GenerationDefaults, tuple[int, ...], tuple[str, ...]]:
    """Return the defaults, the ids that end an answer, and a line for each setting that is left out."""
    remarks: list[str] = []
    defaults: dict[str, Any] = {}
    for key in GenerationDefaults.__dataclass_fields__:
        value = values.get(key)
        if isinstance(value, float) and key == "top_k" and value.is_integer():
            value = int(value)
        if value is not None and _is_allowed(key, value):
            defaults[key] = value
        elif value is not None:
            remarks.append(f"{where}: {key} = {clip(value)} is no value that a request may have: left out")
    if values.get("do_sample") is False:  # greedy, whatever else the file says
        defaults["temperature"] = 0.0
    eos, wrong = _ids(values.get("eos_token_id"))
    if wrong:
        remarks.append(f"{where}: eos_token_id has {clip(wrong)}, which is no token id: left out")
    for key, neutral in _NOT_APPLIED.items():
        value = values.get(key)
        if value is not None and value not in neutral:
            remarks.append(f"{where}: {key} = {clip(value)} is not applied")
    return GenerationDefaults(**defaults), eos, tuple(remarks)


def _is_allowed(key: str, value: Any) -> bool:
    try:
        SamplingParams(**{key: value})
    except (RequestError, TypeError):
        return False
    return not isinstance(value, bool)


def _ids(value: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Return the token ids of one id or a list, and what is none; null and -1 say that there is no id."""
    listed = value if isinstance(value, list) else [value]
    good = [
        item for item in listed if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31
    ]
    return tuple(good), [item for item in listed if item not in (None, -1) and item not in good]
