"""The files of sentence-transformers beside a model: how its rows become one vector, and what is put before a text.

    modules.json                        the parts, in order: the model, a pooling, a normalization
    1_Pooling/config.json               which rows the vector is made of
    sentence_bert_config.json           the longest text
    config_sentence_transformers.json   prompts by name

A folder without modules.json is read as sentence-transformers reads it: the mean of all rows. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.shape import Fields
from quire.modelspec import ModelSpec
from quire.pooling import PoolingMode, SentenceSpec

_MODES: Mapping[str, PoolingMode] = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weighted_mean",
    "lasttoken": "last",
}
_SUPPORTED = ("Transformer", "Pooling", "Normalize")


def with_sentence(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return the spec of an encoder with what the files in ``folder`` say of its vectors.

    Raises:
        ModelLoadError: a file is broken.
        UnsupportedModelError: a part that Quire does not run.
    """
    assert spec.encoder is not None
    head = spec.encoder.head
    sentence = read_sentence(folder) if head is None else SentenceSpec("cls", labels=head.labels)
    return replace(spec, encoder=replace(spec.encoder, sentence=sentence))


def read_sentence(folder: Path) -> SentenceSpec:
    """Return what the files in ``folder`` say, or the default of a folder without them."""
    path = folder / "modules.json"
    if not path.is_file():
        return SentenceSpec("mean")
    modules = [Fields(item, str(path)) for item in _list(path)]
    kinds = [module.text("type").rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in _SUPPORTED:
            raise UnsupportedModelError(
                f"{path}: a module of type {kind!r} is not supported; supported are {', '.join(_SUPPORTED)}."
            )
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"{path}: {', '.join(kinds)}: a model, a pooling and maybe a Normalize are supported."
        )
    pooling = _fields(folder / modules[1].text("path") / "config.json")
    longest = _fields(folder / modules[0].values.get("path", "") / "sentence_bert_config.json")
    longest.refuse("do_lower_case", unless=(False,), why="texts are tokenized as they are sent")
    more = _fields(folder / "config_sentence_transformers.json")
    prompts = more.nested("prompts")
    # An empty prompt stays one, so that a request may name it.
    by_name = {name: text and prompts.text(name) for name, text in prompts.values.items()} if prompts else {}
    default = more.values.get("default_prompt_name")
    if default is not None and default not in by_name:
        raise more.wrong("default_prompt_name", f"one of prompts: {', '.join(by_name)}")
    if any(by_name.values()):
        pooling.refuse(
            "include_prompt", unless=(True,), why="the rows of a prompt are pooled with the others"
        )
    return SentenceSpec(
        _mode(pooling),
        len(kinds) == 3,
        longest.optional_integer("max_seq_length", minimum=1),
        tuple(by_name.items()),
        default,
    )


def _mode(f: Fields) -> PoolingMode:
    """Return the one way of pooling that is on."""
    if f.has("pooling_mode"):
        name = f.text("pooling_mode")
        modes = {mode for mode in (*_MODES.values(), "weightedmean", "lasttoken") if mode == name}
    else:
        modes = {_MODES[key] for key in _MODES if f.flag(f"pooling_mode_{key}")}
    if len(modes) != 1:
        raise UnsupportedModelError(
            f"{f.where}: one way of pooling is supported, not {sorted(modes) or 'none'}."
        )
    mode = modes.pop()
    return {"weightedmean": "weighted_mean", "lasttoken": "last"}.get(mode, mode)  # type: ignore[return-value]


def _fields(path: Path) -> Fields:
    """Return the object of a file; one that is missing is empty."""
    value = _read(path) if path.is_file() else {}
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds no JSON object; download the model again.")
    return Fields(value, str(path))


def _list(path: Path) -> list[Mapping[str, Any]]:
    value = _read(path)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelLoadError(f"{path} holds no list of objects; download the model again.")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not readable JSON ({error}); download the model again.") from None
