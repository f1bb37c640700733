"""The files that say how images become the input of a model's encoder. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from quire.errors import ModelLoadError
from quire.families.vision import prefixes, read_preprocessing
from quire.models.checkpoint import read_json
from quire.modelspec import ModelSpec

_OWN, _SHARED = "preprocessor_config.json", "processor_config.json"


def with_preprocessing(spec: ModelSpec, folder: Path) -> tuple[ModelSpec, tuple[str, ...]]:
    """Return ``spec`` with what the files of ``folder`` say, and how the names of the encoder's tensors begin.

    Where there is no such file, as beside fine-tuned text parts, the model reads texts only and has no ``vision``.

    Raises:
        ModelLoadError: the files are wrong, or contradict ``config.json``.
    """
    vision = spec.vision
    assert vision is not None
    shared = read_json(folder / _SHARED) if (folder / _SHARED).is_file() else {}
    if "image_processor" in shared:
        values, where = shared["image_processor"], f"{folder / _SHARED}, image_processor"
    elif (folder / _OWN).is_file():
        values, where = read_json(folder / _OWN), str(folder / _OWN)
    else:
        return replace(spec, vision=None), ()
    length = shared.get("image_seq_len") if vision.kind == "idefics3" else None
    wanted = vision.num_tokens((vision.image_size, vision.image_size))
    if length not in (None, wanted):
        raise ModelLoadError(
            f"{folder / _SHARED}: image_seq_len = {length!r}, and config.json gives {wanted} tokens "
            "per tile; the files do not belong together."
        )
    preprocessing = read_preprocessing(values, vision, where)
    return replace(spec, vision=replace(vision, preprocessing=preprocessing)), prefixes(vision)
