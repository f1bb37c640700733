"""The keywords of `quire.LLM`: those of `EngineArgs`, and vLLM's spellings of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire.args import EngineArgs, make_args
from quire.errors import ConfigError, nearest

# vLLM's name → ours. `gpu_memory_utilization` and the others are spelled alike.
ALIASES = {"quantization": "quantize", "num_gpu_blocks_override": "num_kv_blocks"}
# vLLM's keywords that change no answer here, and why they are accepted.
NO_EFFECT = {
    "trust_remote_code": "a model is data here; no code of a repository is ever run",
    "enforce_eager": "there are no graphs to turn off",
    "disable_log_stats": "an offline engine logs no statistics",
    "swap_space": "preempted sequences are computed again",
}
DTYPES = {"half": "float16", "float": "float32"}


def llm_args(model: str, given: Mapping[str, Any]) -> EngineArgs:
    """Return the settings that ``LLM(model, **given)`` means.

    Raises:
        ConfigError: an unknown keyword (with the nearest known one), a wrong value, the same setting twice, or
            ``tensor_parallel_size`` above 1.
    """
    values: dict[str, Any] = {"model": model}
    known = [field.name for field in fields(EngineArgs)]
    for key, value in given.items():
        name = ALIASES.get(key, key)
        if key == "tensor_parallel_size":
            _check_tensor_parallel(value)
        elif key in NO_EFFECT:
            continue
        elif name not in known:
            everything = [*known, *ALIASES, *NO_EFFECT, "tensor_parallel_size"]
            raise ConfigError(f"LLM: unknown keyword {key!r}{nearest(key, everything)}")
        elif name in values:
            raise ConfigError(f"LLM: {key} and {_other(key, given)} set the same thing; give one of them")
        elif name == "lora" and isinstance(value, Mapping):
            values[name] = tuple(f"{adapter}={path}" for adapter, path in value.items())
        else:
            values[name] = DTYPES.get(value, value) if name == "dtype" else value
    return make_args(EngineArgs, values, origin="LLM")


def _check_tensor_parallel(value: Any) -> None:
    if value != 1:
        raise ConfigError(
            f"LLM: tensor_parallel_size = {value!r} is not supported yet: a model runs on one device. Leave it out"
        )


def _other(key: str, given: Mapping[str, Any]) -> str:
    name = ALIASES.get(key, key)
    return next((k for k in given if k != key and ALIASES.get(k, k) == name), "the first argument")
