"""`read_spec`: what a model is, from its configuration alone: no weights are downloaded or opened. Torch-free."""

from __future__ import annotations

from pathlib import Path

from quire.errors import ModelLoadError
from quire.families import spec_from_config
from quire.models.checkpoint import describe, read_json
from quire.models.hub import INSTEAD, locate
from quire.models.quill import QUILL_NAMES
from quire.modelspec import ModelSpec
from quire.plan.presets import preset_of, preset_spec


def spec_of(model: str) -> ModelSpec:
    """Return the `ModelSpec` of a preset of the planner, or of whatever `read_spec` finds."""
    name = preset_of(model) if not Path(model).expanduser().exists() else None
    return preset_spec(name) if name is not None else read_spec(model)


def read_spec(name: str, *, revision: str | None = None) -> ModelSpec:
    """Return the `ModelSpec` of "quill", a folder, a GGUF file, a config.json, or a hub id (that file is fetched).

    Raises:
        ModelLoadError: there is no such thing, or its configuration cannot be read.
        UnsupportedModelError: Quire does not run it.
    """
    path = Path(name).expanduser()
    if name in QUILL_NAMES or path.exists():
        path = locate(name)
        config = path if path.suffix == ".json" else path / "config.json"
        return spec_from_config(read_json(config), str(config)) if config.is_file() else describe(path).spec
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or name.endswith((".gguf", ".json")):
        raise ModelLoadError(
            f"there is no preset, file or folder {name!r}, and a hub id is org/repo. {INSTEAD}."
        )
    return spec_from_config(read_json(_config_of_hub(name, revision)), f"{name}/config.json")


def _config_of_hub(repo: str, revision: str | None) -> Path:
    import huggingface_hub  # see `quire.models.hub`
    from huggingface_hub import errors as hub_errors

    try:
        return Path(huggingface_hub.hf_hub_download(repo, "config.json", revision=revision))
    except (hub_errors.HfHubHTTPError, hub_errors.LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"config.json of {repo} cannot be had from the hub ({type(error).__name__}): give a local folder with it, "
            "or one of the planner's presets (docs/planner.md)."
        ) from None
