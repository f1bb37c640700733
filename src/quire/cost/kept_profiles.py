"""The profiles of this machine that `quire profile` keeps where no file is named, and which of them is meant.

There is one per model, machine and settings on which step times depend; measuring again replaces it. `quire serve
--slo`, `quire plan` and `quire simulate` read the newest that fits what they are about.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.cost.profile import Profile, load_profile
from quire.errors import ConfigError
from quire.private import private_folder

MACHINE = ("name", "cores", "isa")
# Settings that a profile was measured with, and holds for alone.
MEASURED = ("dtype", "kv_dtype", "quantize", "threads", "cpu_isa")


def profile_folder() -> Path:
    """Return ``$XDG_STATE_HOME/quire/profiles``."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "quire" / "profiles"


def machine_of(config: EngineConfig) -> dict[str, Any]:
    """Return what the times depend on outside the program."""
    device = config.device
    return {
        "name": device.name,
        "cores": device.num_cores,
        "isa": device.isa,
        "memory_bytes": device.memory_total_bytes,
    }


# Of `CacheConfig`, where a model has recurrent layers.
STATES = ("num_states", "num_checkpoints", "num_draft_states", "state_bytes")


def profiled_settings(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that the times depend on and that a simulation takes over, by the names of the flags."""
    return {
        "dtype": config.model.dtype,
        "kv_dtype": config.model.kv_dtype,
        "quantize": config.model.quantize,
        "threads": config.runner.num_threads,
        "cpu_isa": config.runner.kernels,
        "block_size": config.cache.block_size,
        "num_kv_blocks": config.cache.num_blocks,
        "kv_block_bytes": config.kv_layout.block_bytes(config.cache.block_size, config.model.kv_dtype),
        "windows": list(config.cache.windows),
        "max_model_len": config.scheduler.max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "long_prefill_token_threshold": config.scheduler.long_prefill_token_threshold,
        "max_in_flight": 1,
        **({"speculate": config.speculate.method} if config.speculate else {}),
        **({name: getattr(config.cache, name) for name in STATES} if config.cache.num_states else {}),
    }


def profile_path(model: str, machine: Mapping[str, Any], settings: Mapping[str, Any]) -> Path:
    """Return the file of these, in the folder, which is made.

    Raises:
        ConfigError: it cannot be made.
    """
    key = [model, *(machine.get(k) for k in MACHINE), *(settings.get(k) for k in MEASURED)]
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=4).hexdigest()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", model.rstrip("/").rpartition("/")[2]) or "model"
    folder = profile_folder()
    try:
        private_folder(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made ({error.strerror}): give --out FILE") from error
    return folder / f"{name}-{digest}.json"


def kept(
    model: str | None = None,
    machine: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Path, Profile] | None:
    """Return the newest profile of ``model``, on ``machine``, with those of ``settings`` that are given; None: of any.

    None if there is none.
    """
    usable = [
        (made.measured_at, path, made)
        for path, made in _all()
        if model in (None, made.model)
        and _agree(made.machine, machine, MACHINE)
        and _agree(made.settings, settings, MEASURED)
    ]
    if not usable:
        return None
    _, path, made = max(usable, key=lambda entry: entry[:2])
    return path, made


def _all() -> Iterator[tuple[Path, Profile]]:
    for path in sorted(profile_folder().glob("*.json")):
        with suppress(ConfigError):  # a profile of another version
            yield path, load_profile(path)


def _agree(here: Mapping[str, Any], wanted: Mapping[str, Any] | None, names: tuple[str, ...]) -> bool:
    return wanted is None or all(here.get(name) == wanted[name] for name in names if name in wanted)
