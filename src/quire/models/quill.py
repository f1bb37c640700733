"""Quill, the model that ships with Quire: where its folders lie in the installed package.

Each folder is an ordinary Hugging Face checkpoint (config, safetensors, tokenizer, chat template, generation defaults);
no other code treats it as special. docs/quill.md says what the models are and how they were made.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from quire.errors import ModelLoadError, nearest

QUILL_NAMES = ("quill", "quill-draft")


def quill_path(name: str) -> Path:
    """Folder of the shipped model ``name``. Raises `ModelLoadError` for another name or when its data is missing."""
    if name not in QUILL_NAMES:
        allowed = ", ".join(QUILL_NAMES)
        raise ModelLoadError(
            f"no shipped model is named {name!r}; there are: {allowed}{nearest(name, QUILL_NAMES)}"
        )
    folder = Path(str(files("quire.models"))) / "quill_data" / name
    if not (folder / "model.safetensors").is_file():
        raise ModelLoadError(
            f"the weights of {name!r} are not installed ({folder}); reinstall quire, or give a model folder"
        )
    return folder
