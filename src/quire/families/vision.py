"""Models that see: the encoder's part of ``config.json``, and of its preprocessing's files. One module per kind."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from quire.families.shape import Fields
from quire.modelspec import ModelSpec
from quire.vision_spec import Preprocessing, VisionSpec

# Architecture → the module here, without its "vision_"; also the kind of the `VisionSpec`.
_KINDS = {
    "Gemma3ForConditionalGeneration": "gemma3",
    "Idefics3ForConditionalGeneration": "idefics3",
    "SmolVLMForConditionalGeneration": "idefics3",
    "Qwen2_5_VLForConditionalGeneration": "qwen_vl",
    "Qwen3VLForConditionalGeneration": "qwen_vl",
}


def text_part(f: Fields) -> Fields | None:
    """Return the decoder's part of a whole ``config.json``; None: there is none."""
    text = f.nested("text_config")
    if text is None and "Qwen2_5_VLForConditionalGeneration" in f.items("architectures"):
        # Its files say all of the decoder beside vision_config.
        text = Fields({key: value for key, value in f.values.items() if key != "vision_config"}, f.where)
    scaling = None if text is None else text.values.get("rope_scaling")
    if text is not None and isinstance(scaling, Mapping) and scaling.get("type") == "mrope":
        # Positions with three axes, which are equal in a text.
        scaling = {**scaling, "type": "default", "rope_type": "default"}
        text = Fields({**text.values, "rope_scaling": scaling}, text.where)
    return text


def read_vision(config: Mapping[str, Any], spec: ModelSpec, where: str) -> VisionSpec | None:
    """Return the encoder of a whole ``config.json`` whose decoder is ``spec``; None if it does not run.

    Raises:
        ModelLoadError, UnsupportedModelError: a value is missing or wrong, or asks for what is not here.
    """
    kind = next((_KINDS[name] for name in config["architectures"] if name in _KINDS), None)
    if kind is None:
        return None
    read: VisionSpec = _of(kind).read_vision(config, spec, where)
    return read


def read_preprocessing(config: Mapping[str, Any], vision: VisionSpec, where: str) -> Preprocessing:
    """Return what ``preprocessor_config.json``, or ``image_processor`` of ``processor_config.json``, says."""
    read: Preprocessing = _of(vision.kind).read_preprocessing(config, vision, where)
    return read


def encoder_shapes(vision: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of the encoder and its projector, by its name in checkpoints without "model."."""
    shapes: dict[str, tuple[int, ...]] = _of(vision.kind).encoder_shapes(vision)
    return shapes


def prefixes(vision: VisionSpec) -> tuple[str, ...]:
    """Return how the names of these tensors begin, with and without "model."."""
    bare: tuple[str, ...] = _of(vision.kind).PREFIXES
    return (*bare, *(f"model.{prefix}" for prefix in bare))


def canonical(vision: VisionSpec, name: str) -> str:
    """Return the name of one of these tensors in `encoder_shapes`, given that of a checkpoint; "": nothing uses it."""
    name, of_kind = name.removeprefix("model."), getattr(_of(vision.kind), "canonical", None)
    return name if of_kind is None else str(of_kind(name))


def _of(kind: str) -> Any:
    return import_module(f"quire.families.vision_{kind}")
