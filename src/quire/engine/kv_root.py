"""`kv_root`: the name of everything that the bits of a KV block depend on, apart from its tokens.

Blocks that outlive the process are found again by other processes: the name holds the content of the model, not its
path, and whatever decides how that content is computed. Two engines with one name compute the same bits. `with_tier` is
the configuration of an engine that keeps such blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from urllib.parse import urlsplit

from quire.args import EngineArgs
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


def with_tier(config: EngineConfig, args: EngineArgs, files: Iterable[Path]) -> EngineConfig:
    """Return ``config`` with the tier of ``args``. ``files``: the weights of the model.

    Raises:
        ConfigError: the setting is of another form, or this engine cannot have a tier.
    """
    if args.kv_disk is not None and args.kv_remote is not None:
        raise ConfigError("kv_disk and kv_remote are both set: an engine has one tier", param="kv_remote")
    param = "kv_disk" if args.kv_disk is not None else "kv_remote"
    tier = _folder(args.kv_disk) if args.kv_disk is not None else (_server(args.kv_remote or ""), 0)
    unmet = (
        "prefix caching" if not config.cache.enable_prefix_caching
        else "a model on a CPU" if config.device.kind != "cpu"
        else "a model in one process" if config.topology.world_size > 1
        else "a model without recurrent layers, whose states are not kept" if config.cache.num_states
        else None
    )  # fmt: skip
    if unmet is not None:
        raise ConfigError(f"{param} needs {unmet}: leave it out", param=param)
    root = kv_root(config, content_digest(files))
    return replace(config, cache=replace(config.cache, model_key=root, tier=tier))


def _folder(setting: str) -> tuple[str, int]:
    """Read DIR:SIZE."""
    folder, _, size = setting.rpartition(":")
    if not folder:
        raise ConfigError(
            f"kv_disk = {setting!r} must be DIR:SIZE, as /var/cache/quire-kv:20GiB", param="kv_disk"
        )
    return str(Path(folder).expanduser().absolute()), parse_bytes(size, name="kv_disk")


def _server(url: str) -> str:
    """Check the URL of a server. A password in it is refused: settings are shown, logged and recorded."""
    parts = urlsplit(url)
    if parts.password is not None:
        raise ConfigError(
            "kv_remote has a password: put it into the environment as QUIRE_KV_REMOTE_PASSWORD",
            param="kv_remote",
        )
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"kv_remote = {url!r} must be redis://HOST:PORT/DB, rediss://… or unix://PATH", param="kv_remote"
        )
    return url
