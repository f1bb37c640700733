"""Recordings as files: gzipped msgpack in a folder that only this user can read, at most `MAX_FILES` of each kind."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from quire import __version__
from quire.args import EngineArgs
from quire.config import EngineConfig, RecorderConfig
from quire.errors import ConfigError
from quire.executor.recorder import Recorder, Recording
from quire.metrics.log import Log
from quire.private import private_folder, written_anew

MAX_FILES = 8  # per kind; the oldest are deleted
SUFFIX = ".rec"
_MAGIC = b"quire recording 1\n"
log = Log("recorder")


def default_folder() -> Path:
    """Return ``$XDG_STATE_HOME/quire/recordings``."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "quire" / "recordings"


def recorder_config(
    folder: str | None, num_steps: int, *, with_ids: bool, args: EngineArgs, config: EngineConfig, fingerprint: str
) -> RecorderConfig | None:  # fmt: skip
    """Return what an engine records with: ``args``, with what `resolve` chose; None where ``num_steps`` is 0."""
    if not num_steps:
        return None
    model, scheduler = config.model, config.scheduler
    chosen = {
        "model": model.path if model.name != "quill" else "quill", "revision": None, "tokenizer": model.tokenizer,
        "dtype": model.dtype, "kv_dtype": model.kv_dtype if model.kv_dtype != model.dtype else "auto",
        "max_model_len": model.max_model_len, "max_num_seqs": scheduler.max_num_seqs, "device": config.device.kind,
        "max_loras": scheduler.max_loras or None, "max_lora_rank": config.lora.max_rank if config.lora else None,
        "lora_modules_to_save": config.lora.saved if config.lora else None,
    }  # fmt: skip
    set_values = {name: value for name, value in (asdict(args) | chosen).items() if value is not None}
    settings = json.dumps(set_values)
    return RecorderConfig(str(folder or default_folder()), num_steps, with_ids, fingerprint, settings)


def about(config: EngineConfig) -> dict[str, str]:
    """Return what a recording says of its engine."""
    model, runner = config.model, config.runner
    return {
        "quire": __version__,
        "model": model.name,
        "fingerprint": config.recorder.fingerprint if config.recorder is not None else "",
        "kernels": runner.kernels,
        "formats": "/".join((model.dtype, model.kv_dtype, model.quantize or "as stored")),
        "determinism": config.determinism,
        "device": config.device.name,
        "threads": str(runner.num_threads),
        "torch": version("torch"),
    }


def save(recorder: Recorder, config: EngineConfig, reason: str, text: str = "") -> dict[str, Any]:
    """Write a recording to a file of the folder; return its path and the number of steps.

    Raises:
        OSError: it cannot be written.
    """
    settings = config.recorder
    assert settings is not None
    now = datetime.now(UTC)
    description = about(config) | {
        "reason": reason,
        "text": text,
        "at": now.isoformat(timespec="milliseconds"),
    }
    taken = recorder.take(description, settings.settings, with_ids=settings.with_ids)
    data = _MAGIC + gzip.compress(msgspec.msgpack.encode(taken), 1)
    path = keep(Path(settings.folder), f"{os.getpid()}-{reason}{SUFFIX}", data, now)
    log.warning("recording_saved", file=path, reason=reason, steps=len(taken.steps))
    return {"path": str(path), "num_steps": len(taken.steps), "num_bytes": len(data)}


def saver(recorder: Recorder, config: EngineConfig) -> Callable[[str, str], dict[str, Any]]:
    return partial(save, recorder, config)


def keep(folder: Path, name: str, data: bytes, now: datetime) -> Path:
    """Write a file that only this user can read, and delete the oldest of its kind beyond `MAX_FILES`."""
    private_folder(folder, is_ours=False, files="quire-*")
    path = folder / f"quire-{now:%Y%m%dT%H%M%S.%fZ}-{name}"
    half = path.with_name(f".{path.name}")
    try:
        with written_anew(half) as file:
            file.write(data)
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
        raise
    for old in sorted(folder.glob(f"quire-*{path.suffix}"))[:-MAX_FILES]:
        old.unlink(missing_ok=True)
    return path


def load(path: Path) -> Recording:
    """Read a recording.

    Raises:
        ConfigError: it cannot be read, is no recording, or is one of another version of Quire.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if not data.startswith(_MAGIC):
        raise ConfigError(
            f"{path} is no recording of this version: it does not begin with {_MAGIC.decode().strip()!r}"
        )
    try:
        return msgspec.msgpack.decode(gzip.decompress(data[len(_MAGIC) :]), type=Recording)
    except (OSError, EOFError, zlib.error, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path} is damaged, or was written by another version of Quire: {error}"
        ) from error
