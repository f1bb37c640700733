"""Fields that the configurations of all decoders share: sizes, heads, windows, activations, ids.

`Fields` reads a ``config.json`` by type; every error names the key, its value and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from quire.errors import ModelLoadError, UnsupportedModelError, clip
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.rope_spec import RopeSpec

LARGEST = 2**31 - 1  # largest integer accepted: token ids have 32 bits
MOST_LAYERS = 4096


class Fields:
    """One JSON object of a model's configuration. A key that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Tell whether the key is there and null, for the few keys where that differs from leaving it out."""
        return key in self.values and self.values[key] is None

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer ≥ ``minimum``, at most `LARGEST`; without a ``default`` the key is required."""
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some converters write 32.0
        most = MOST_LAYERS if key in ("num_hidden_layers", "block_count") else LARGEST
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= most:
            raise self.wrong(key, f"an integer in {minimum}…{most}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 0) -> int | None:
        return self.integer(key, minimum=minimum) if self.has(key) else None

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """Return a finite number (> 0 unless ``positive`` is False)."""
        value = self._get(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or (positive and value <= 0):
            raise self.wrong(key, "a finite number > 0" if positive else "a finite number")
        return float(value)

    def optional_number(self, key: str, *, positive: bool = True) -> float | None:
        return self.number(key, positive=positive) if self.has(key) else None

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of exactly ``count`` finite numbers."""
        value = self._get(key, None)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise self.wrong(key, f"a list of {count} numbers")
        for item in value:
            if not isinstance(item, int | float) or isinstance(item, bool) or not math.isfinite(item):
                raise self.wrong(key, f"a list of {count} numbers")
        return tuple(float(item) for item in value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a string")
        return value

    def items(self, key: str) -> list[Any]:
        """Return a list, empty when the key is absent."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise self.wrong(key, "a list")
        return list(value)

    def texts(self, key: str) -> list[str]:
        """Return a list of strings, empty when the key is absent."""
        items = self.items(key)
        if not all(isinstance(item, str) for item in items):
            raise self.wrong(key, "a list of strings")
        return items

    def integers(self, key: str) -> tuple[int, ...]:
        """Return the integers ≥ 0 of a key that holds one of them or a list; empty when absent."""
        value = self.values.get(key)
        items = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        for item in items:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= LARGEST:
                raise self.wrong(key, "an integer ≥ 0 or a list of them")
        return tuple(items)

    def nested(self, key: str) -> Fields | None:
        """Return the nested object, or None when the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.where}, {key}")

    def refuse(self, key: str, *, unless: tuple[object, ...], why: str) -> None:
        """Raise `UnsupportedModelError` when the key is present with a value other than those of ``unless``."""
        value = self.values.get(key)
        if value is not None and value not in unless:
            allowed = " or ".join(repr(item) for item in unless) or "absent"
            raise UnsupportedModelError(
                f"{self.where}: {key} = {value!r} is not supported ({why}); it must be {allowed}."
            )

    def wrong(self, key: str, allowed: str) -> ModelLoadError:
        value = self.values.get(key)
        problem = f"{key} = {clip(value)} makes no sense"
        if value is None:
            problem = f"{key} is {'null' if key in self.values else 'missing'}"
        return ModelLoadError(
            f"{self.where}: {problem}; it must be {allowed}. Correct the file or download the model again."
        )

    def _get(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.wrong(key, "present")
            return default
        return value


Activation = Literal["silu", "gelu_tanh", "gelu", "swiglu_oai"]
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
DTYPES = ("float32", "bfloat16", "float16")


def head_dim_of(f: Fields) -> int:
    """Return ``head_dim``, or hidden_size / num_attention_heads where the configuration lacks it."""
    if f.has("head_dim"):
        return f.integer("head_dim")
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    if hidden % heads:
        raise f.wrong("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    return hidden // heads


def attention(
    f: Fields, *, rope: RopeSpec | None, scale: float | None = None, head_dim: int | None = None, **more: Any
) -> AttentionSpec:
    """Return multi-head or grouped-query attention; ``scale`` defaults to head_dim ** −½.

    ``more``: further fields of `AttentionSpec`.
    """
    heads = f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise f.wrong("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    dim = head_dim if head_dim is not None else head_dim_of(f)
    return AttentionSpec(heads, kv_heads, dim, dim, dim**-0.5 if scale is None else scale, rope, **more)


def biases(f: Fields, default: bool = False) -> dict[str, bool]:
    """Return the fields of `AttentionSpec` that ``attention_bias`` says: biases of all four projections, or of none."""
    bias = f.flag("attention_bias", default)
    return {"qkv_bias": bias, "o_bias": bias}


def dense(f: Fields, *, bias: bool = False) -> MlpSpec:
    """Return the dense block of ``intermediate_size`` and ``hidden_act``."""
    return MlpSpec(f.integer("intermediate_size"), activation(f), bias)


def activation(f: Fields, key: str = "hidden_act", default: str = "silu") -> Activation:
    name = f.text(key, default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{f.where}: {key} = {name!r} is not supported; supported are {', '.join(sorted(_ACTIVATIONS))}."
        )
    return _ACTIVATIONS[name]


def layer_types(f: Fields, default: Sequence[str]) -> tuple[str, ...]:
    """Return ``layer_types``, or ``default``: "full_attention" or "sliding_attention" per layer."""
    count = f.integer("num_hidden_layers")
    kinds = f.texts("layer_types") or list(default)
    if len(kinds) != count:
        raise f.wrong("layer_types", f"a list of num_hidden_layers = {count} entries")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"{f.where}: layers of type {kind!r} are not supported; supported are 'full_attention' "
                "and 'sliding_attention'."
            )
    return tuple(kinds)


def window_of(f: Fields, kind: str, default: int | None = None) -> int | None:
    """Return the window of a layer of that type: ``sliding_window`` for "sliding_attention", else None."""
    if kind != "sliding_attention":
        return None
    if default is None and not f.has("sliding_window"):
        raise f.wrong("sliding_window", "an integer ≥ 1, since layer_types has 'sliding_attention'")
    return f.integer("sliding_window", default)


def uniform_window(f: Fields, default: int | None = None) -> int | None:
    """Return ``sliding_window`` where it applies to every layer (Mistral, Phi-3); None means full attention.

    ``default``: the family's, for a file without the key; null says that there is no window.
    """
    window = f.optional_integer("sliding_window", minimum=1)
    return window if "sliding_window" in f.values else default


def soft_cap(f: Fields, key: str, default: float | None = None) -> float | None:
    """Return a soft cap, the family's default in a file without the key; null says that there is none."""
    return f.optional_number(key) if key in f.values else default


def assemble(
    f: Fields, family: str, layers: Sequence[LayerSpec] | LayerSpec, *, tied: bool = False, eps: float = 1e-6,
    **more: Any,
) -> ModelSpec:  # fmt: skip
    """Put the layers (one spec: all are alike) and the fields that all families share into a `ModelSpec`.

    ``tied``, ``eps``: the family's defaults of ``tie_word_embeddings`` and ``rms_norm_eps``, as transformers has them.
    ``more``: further fields of `ModelSpec`.
    """
    if isinstance(layers, LayerSpec):
        layers = [layers] * f.integer("num_hidden_layers")
    bos = token_ids(f, "bos_token_id")
    longest = f.integer("max_position_embeddings")
    ropes = [layer.attn.rope for layer in layers if layer.attn is not None]
    rope = next((known for known in ropes if known is not None), None)
    if rope is not None and rope.kind in ("dynamic", "yarn"):
        # For dynamic the key is the length where stretching begins; for YaRN some files (Qwen's) also give that length.
        longest = max(longest, int(rope.original_max_position * rope.factor))
    return ModelSpec(
        family=family,
        architecture=str(f.items("architectures")[0]),
        vocab_size=f.integer("vocab_size"),
        hidden_size=f.integer("hidden_size"),
        layers=tuple(layers),
        norm_eps=f.number("rms_norm_eps", eps),
        max_position_embeddings=longest,
        dtype=dtype_of(f),
        tie_word_embeddings=f.flag("tie_word_embeddings", tied),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=token_ids(f, "eos_token_id"),
        **more,
    )


def token_ids(f: Fields, key: str) -> tuple[int, ...]:
    """Return the token ids of a key that holds one of them or a list; -1 is how some files write that there is none."""
    value = f.values.get(key)
    listed = value if isinstance(value, list | tuple) else [value]
    return Fields({key: [item for item in listed if item not in (None, -1)]}, f.where).integers(key)


def dtype_of(f: Fields) -> str:
    """Return ``dtype`` (transformers 5) or ``torch_dtype``; bfloat16 where neither is given, or "auto" is."""
    name = f.text("dtype", f.text("torch_dtype", "bfloat16")).removeprefix("torch.")
    name = "bfloat16" if name == "auto" else name
    if name not in DTYPES:
        key = "dtype" if f.has("dtype") else "torch_dtype"
        raise UnsupportedModelError(
            f"{f.where}: {key} = {name!r} is not supported; supported are {', '.join(DTYPES)}."
        )
    return name
