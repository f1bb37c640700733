"""`kv_root`: the name of everything that the bits of a KV block depend on, apart from its tokens.

Blocks that outlive the process are found again by other processes: the name holds the content of the model, not its
path, and whatever decides how that content is computed. Two engines with one name compute the same bits. `with_tier` is
the configuration of an engine that keeps such blocks.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from urllib.parse import urlsplit

from quire.args import EngineArgs, comma_list
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.models.content import content_digest
from quire.resolve import parse_bytes

# Raised by every change of the bits that a kernel, a layer or the rounding of weights gives; a golden test tells.
ARITHMETIC = "3"


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
    tiers = _tiers(args)
    param = next(iter(tiers))
    unmet = (
        "prefix caching" if not config.cache.enable_prefix_caching
        else "a model on a CPU" if config.device.kind != "cpu"
        else "a model in one process" if config.topology.world_size > 1
        else "room for checkpoints of recurrent states" if config.cache.num_states and not config.cache.num_checkpoints
        else None
    )  # fmt: skip
    if unmet is not None:
        raise ConfigError(f"{param} needs {unmet}: leave it out", param=param)
    root = kv_root(config, content_digest(files))
    cache = replace(config.cache, model_key=root, tiers=tuple(tiers.values()))
    if "kv_share" in tiers:
        cache = replace(cache, peers=comma_list(args.kv_peers), engine_id=secrets.token_hex(16))
    return replace(config, cache=cache)


def _tiers(args: EngineArgs) -> dict[str, tuple[str, int]]:
    """Return the settings that ask for tiers, with the tiers, in the order of `CacheConfig.tiers`."""
    if args.kv_peers is not None and args.kv_share is None:
        raise ConfigError(
            "kv_peers needs kv_share: an engine that takes blocks gives its own", param="kv_peers"
        )
    ways = {
        "kv_share": (args.kv_share, _shared),
        "kv_disk": (args.kv_disk, _folder),
        "kv_remote": (args.kv_remote, _server),
    }
    return {name: read(value) for name, (value, read) in ways.items() if value is not None}


def _folder(setting: str) -> tuple[str, int]:
    """Read DIR:SIZE."""
    folder, _, size = setting.rpartition(":")
    if not folder:
        raise ConfigError(
            f"kv_disk = {setting!r} must be DIR:SIZE, as /var/cache/quire-kv:20GiB", param="kv_disk"
        )
    return str(Path(folder).expanduser().absolute()), parse_bytes(size, name="kv_disk")


def _shared(setting: str) -> tuple[str, int]:
    """Read HOST:PORT:SIZE."""
    address, _, size = setting.rpartition(":")
    if ":" not in address:
        raise ConfigError(
            f"kv_share = {setting!r} must be HOST:PORT:SIZE, as 10.0.0.7:9500:4GiB", param="kv_share"
        )
    return address, parse_bytes(size, name="kv_share")


def _server(url: str) -> tuple[str, int]:
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
    return url, 0
