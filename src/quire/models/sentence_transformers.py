"""The files of sentence-transformers beside a model: how its rows become one vector, and what is put before a text.

    modules.json                        the parts, in order: the model, a pooling, linears, a normalization
    1_Pooling/config.json               which rows the vector is made of
    2_Dense/config.json                 a linear after the pooling, with its weights beside it
    1_SpladePooling/config.json         a weight per token of the vocabulary instead of a vector
    1_LogitScore/config.json            the tokens by which a decoder ranks
    sentence_bert_config.json           the longest text
    config_sentence_transformers.json   prompts by name

A folder without modules.json is read as sentence-transformers reads it: the mean of all rows. Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quire.encoder_spec import EncoderSpec
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.bert import labels_of, score_of
from quire.families.encoder_table import DECODER_CLASSIFIERS
from quire.families.shape import Fields
from quire.families.vocabulary_heads import with_vocabulary
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
_ACTIVATIONS: Mapping[str, Literal["identity", "tanh", "gelu", "relu"]] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
}


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear that a pooled vector goes through."""

    folder: Path  # holds its weights
    in_features: int
    out_features: int
    bias: bool
    activation: Literal["identity", "tanh", "gelu", "relu"]


_SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore", "MLMTransformer", "SpladePooling")


def with_sentence(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with what the files in ``folder`` say of its vectors.

    Raises:
        ModelLoadError: a file is broken.
        UnsupportedModelError: a part that Quire does not run.
    """
    if spec.encoder is None:
        config = _fields(folder / "config.json")
        if classifies(config.values):
            labels = labels_of(config)
            return replace(
                spec, sentence=SentenceSpec("last", labels=labels, score=score_of(config, len(labels)))
            )
        return replace(spec, sentence=_of_decoder(folder, read_sentence(folder)))
    head = spec.encoder.head
    sentence = read_sentence(folder) if head is None else SentenceSpec("cls", labels=head.labels)
    if sentence.sparse:
        encoder = _with_vocabulary(folder, spec, spec.encoder)
        return replace(spec, encoder=encoder, sentence=sentence)
    if sentence.yes_no is not None:
        raise UnsupportedModelError(f"{folder / 'modules.json'}: LogitScore is for decoders.")
    return replace(spec, sentence=sentence)


def classifies(config: Mapping[str, Any]) -> bool:
    """Whether ``config`` is of a decoder with a classifier in place of its output matrix."""
    names = config.get("architectures")
    return isinstance(names, list) and any(name in DECODER_CLASSIFIERS for name in names)


def _of_decoder(folder: Path, sentence: SentenceSpec) -> SentenceSpec:
    """Return what a decoder's files say, which Quire runs in part."""
    if sentence.sparse:
        raise UnsupportedModelError(f"{folder / 'modules.json'}: SpladePooling is for encoders.")
    if sentence.pooling not in ("last", "mean"):
        raise UnsupportedModelError(
            f"{folder}: pooling {sentence.pooling!r} is not supported with a decoder, but 'last' and 'mean'."
        )
    if dense_of(folder):
        raise UnsupportedModelError(f"{folder / 'modules.json'}: Dense is not supported with a decoder.")
    return sentence


def read_sentence(folder: Path) -> SentenceSpec:
    """Return what the files in ``folder`` say, or the default of a folder without them."""
    path = folder / "modules.json"
    if not path.is_file():
        return SentenceSpec("mean")
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    for kind in kinds:
        if kind not in _SUPPORTED:
            raise UnsupportedModelError(
                f"{path}: a module of type {kind!r} is not supported; supported are {', '.join(_SUPPORTED)}."
            )
    if kinds == ["Transformer", "LogitScore"]:
        return replace(SentenceSpec("last", yes_no=_yes_no(folder, modules[1][1])), **_prompts(folder))
    longest = _fields(folder / modules[0][1].values.get("path", "") / "sentence_bert_config.json")
    longest.refuse("do_lower_case", unless=(False,), why="texts are tokenized as they are sent")
    max_tokens = longest.optional_integer("max_seq_length", minimum=1)
    if kinds in (["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"]):
        return SentenceSpec("max", False, max_tokens, sparse=True, **_prompts(folder))
    normalizes = kinds[-1] == "Normalize"
    between = kinds[2:-1] if normalizes else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(between) - {"Dense"}:
        raise UnsupportedModelError(
            f"{path}: {', '.join(kinds)}: a model, a pooling, Dense and maybe a Normalize at the end are supported."
        )
    pooling = _fields(folder / modules[1][1].text("path") / "config.json")
    prompts = _prompts(folder)
    if any(text for _, text in prompts["prompts"]):
        pooling.refuse(
            "include_prompt", unless=(True,), why="the rows of a prompt are pooled with the others"
        )
    dense_of(folder)
    return SentenceSpec(_mode(pooling), normalizes, max_tokens, **prompts)


def _with_vocabulary(folder: Path, spec: ModelSpec, encoder: EncoderSpec) -> EncoderSpec:
    """Return ``encoder`` with the head of masked tokens of which SpladePooling makes weights."""
    pooling = _fields(folder / _modules(folder)[1][1].text("path") / "config.json")
    pooling.refuse(
        "pooling_strategy", unless=("max", "sum"), why="the weights of rows are made one in these ways"
    )
    pooling.refuse("activation_function", unless=("relu", "log1p_relu"), why="these activations are computed")
    over_rows: Literal["max", "sum"] = "sum" if pooling.text("pooling_strategy", "max") == "sum" else "max"
    log_twice = pooling.text("activation_function", "relu") == "log1p_relu"
    config = _fields(folder / "config.json")
    return with_vocabulary(config, spec.family, encoder, over_rows, log_twice=log_twice)


def _modules(folder: Path) -> list[tuple[str, Fields]]:
    """Return the kind and the entry of each part in modules.json; empty where there is no such file."""
    path = folder / "modules.json"
    entries = [Fields(item, str(path)) for item in _list(path)] if path.is_file() else []
    return [(entry.text("type").rpartition(".")[2], entry) for entry in entries]


def dense_of(folder: Path) -> tuple[DenseSpec, ...]:
    """Return the linears of a model of vectors, in order. Raises as `with_sentence`."""
    return tuple(_dense(folder / module.text("path")) for kind, module in _modules(folder) if kind == "Dense")


def _prompts(folder: Path) -> dict[str, Any]:
    """Return the fields of a `SentenceSpec` that prompts have."""
    more = _fields(folder / "config_sentence_transformers.json")
    prompts = more.nested("prompts")
    # An empty prompt stays one, so that a request may name it.
    by_name = {name: text and prompts.text(name) for name, text in prompts.values.items()} if prompts else {}
    default = more.values.get("default_prompt_name")
    if default is not None and default not in by_name:
        raise more.wrong("default_prompt_name", f"one of prompts: {', '.join(by_name)}")
    return {"prompts": tuple(by_name.items()), "default_prompt": default}


def _dense(folder: Path) -> DenseSpec:
    f = _fields(folder / "config.json")
    f.refuse("activation_function", unless=tuple(_ACTIVATIONS), why="these activations are computed")
    f.refuse("use_residual", unless=(False,), why="a Dense is one linear")
    for key in ("module_input_name", "module_output_name"):
        f.refuse(key, unless=("sentence_embedding",), why="a Dense changes the vector of a text")
    kind = _ACTIVATIONS[f.text("activation_function", "torch.nn.modules.activation.Tanh")]
    return DenseSpec(folder, f.integer("in_features"), f.integer("out_features"), f.flag("bias", True), kind)


def _yes_no(folder: Path, module: Fields) -> tuple[int, int]:
    f = _fields(folder / module.text("path") / "config.json")
    f.refuse("module_input_name", unless=("causal_logits",), why="scores are made of the last row's logits")
    if not f.has("false_token_id"):
        raise UnsupportedModelError(f"{f.where}: a score without false_token_id is not supported.")
    return f.integer("true_token_id", minimum=0), f.integer("false_token_id", minimum=0)


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
