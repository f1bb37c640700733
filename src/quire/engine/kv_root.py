"""`kv_root`: the name of everything that the bits of a KV block depend on, apart from its tokens.

Blocks that outlive the process are found again by other processes: the name holds the content of the model, not its
path, and whatever decides how that content is computed. Two engines with one name compute the same bits. `with_disk` is
the configuration of an engine that keeps such blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.models.content import content_digest
from quire.resolve import parse_bytes

# Raised by every change of the bits that a kernel, a layer or the rounding of weights gives; a golden test tells.
ARITHMETIC = "1"


def kv_root(config: EngineConfig, content: str) -> str:
    """Return 32 hexadecimal digits. ``content``: of `content_digest`.

    The context's length counts: rotary frequencies and the layout of blocks may depend on it. So does the processor:
    torch chooses by it how it multiplies. Adapters and salts enter behind the root (`cache.prefix_cache.root_hash`).
    """
    model, runner, device = config.model, config.runner, config.device
    processor = device.name.partition(" (")[0]  # without the number of cores
    scope = (
        "quire.kv.v1", ARITHMETIC, content, model.load_format == "random" and model.seed, model.spec, model.dtype,
        sorted(model.formats.items(), key=itemgetter(0)), model.kv_dtype, model.max_model_len, config.kv_layout,
        config.cache.block_size, config.topology, device.kind, processor, runner.backend, runner.kernels,
        version("torch"),
    )  # fmt: skip
    return hashlib.blake2b(repr(scope).encode(), digest_size=16).hexdigest()


def with_disk(config: EngineConfig, setting: str, files: Iterable[Path]) -> EngineConfig:
    """Return ``config`` with the tier of ``setting``, DIR:SIZE. ``files``: the weights of the model.

    Raises:
        ConfigError: the setting is of another form, or this engine cannot have a tier.
    """
    folder, _, size = setting.rpartition(":")
    if not folder:
        raise ConfigError(
            f"kv_disk = {setting!r} must be DIR:SIZE, as /var/cache/quire-kv:20GiB", param="kv_disk"
        )
    unmet = (
        "prefix caching" if not config.cache.enable_prefix_caching
        else "a model on a CPU" if config.device.kind != "cpu"
        else "a model in one process" if config.topology.world_size > 1
        else "a model without recurrent layers, whose states are not kept" if config.cache.num_states
        else None
    )  # fmt: skip
    if unmet is not None:
        raise ConfigError(f"kv_disk needs {unmet}: leave it out", param="kv_disk")
    root = kv_root(config, content_digest(files))
    disk = str(Path(folder).expanduser().absolute()), parse_bytes(size, name="kv_disk")
    return replace(config, cache=replace(config.cache, model_key=root, disk=disk))
