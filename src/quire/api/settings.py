"""`ApiSettings`: the settings of the HTTP API."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quire.args import ServerArgs, defaults
from quire.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from quire.http.refusals import PLACEHOLDERS
from quire.units import MIB

if TYPE_CHECKING:
    from quire.http.keys import KeyFile

_SERVER = defaults(ServerArgs)


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of the HTTP API. The served names are `ModelInfo.names`."""

    version: str = "0"
    system_fingerprint: str = "fp_unknown"  # see `fingerprint`
    api_keys: tuple[str, ...] = ()  # with no key_file either, no key is needed
    key_file: KeyFile | None = None
    gateway_key: str | None = None  # lets a gateway ask for tagged streams
    cors_origins: tuple[str, ...] = ()  # see `quire.http.browser_guard`, also for the next
    allowed_hosts: tuple[str, ...] | None = None
    lenient: bool = False  # accept every unknown request field
    strict_fields: bool = False  # refuse every unknown request field
    max_body_bytes: int = _SERVER["max_body_mib"] * MIB
    # A name of `quire.text.output.FORMATS`; auto: what the chat template shows.
    tool_format: str = "auto"
    shared_cache: CacheConfig | None = None  # where peers take blocks
    cache: CacheConfig | None = None  # where gateways are told which blocks there are
    retry_after_s: int = 1  # sent with 503
    # Of a request for many texts, in the engine at once: two steps' worth, so that other requests get their share.
    tokens_at_once: int = 2 * defaults(SchedulerConfig)["max_num_batched_tokens"]
    cache_config: Mapping[str, object] = field(default_factory=dict)  # labels of vllm:cache_config_info
    response_store_bytes: int = (
        _SERVER["response_store_mib"] * MIB
    )  # bytes of stored responses; 0 stores none
    response_dir: Path | None = None  # for responses made in the background
    journal_dir: Path | None = None  # for streams that can be resumed
    journal_bytes: int = _SERVER["journal_mib"] * MIB
    model: ModelConfig | None = None  # for Ollama's clients, which are told about it
    stand_ins: tuple[str, ...] = PLACEHOLDERS  # names of whatever is served; * stands for anything


def fingerprint(config: EngineConfig, version: str) -> str:
    """Return ``system_fingerprint``: equal fingerprints and seeds give equal tokens."""
    scope = (
        version,
        config.cache.model_key,
        config.model.dtype,
        config.model.kv_dtype,
        config.model.quantize,
        config.cache.block_size,
        config.device.kind,
        config.runner.kernels,
        config.device.native,
    )
    return "fp_" + hashlib.blake2b(repr(scope).encode(), digest_size=6).hexdigest()
