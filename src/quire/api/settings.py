"""What the API is built with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of the HTTP API. The served names are `ModelInfo.names`."""

    version: str = "0"
    system_fingerprint: str = "fp_unknown"  # see `fingerprint`
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    cors_origins: tuple[str, ...] = ()  # empty: no CORS headers; "*": every origin
    lenient: bool = False  # accept unknown request fields, listed in the x-quire-ignored-fields header
    max_body_bytes: int = 32 * 2**20
    tool_format: str = "auto"  # a name of quire.text.output.FORMATS, or what the chat template shows
    retry_after_s: int = 1  # sent with 503
    cache_config: Mapping[str, object] = field(default_factory=dict)  # labels of vllm:cache_config_info
    response_store_bytes: int = 64 * 2**20  # of /v1/responses; 0 stores none


def fingerprint(config: EngineConfig, version: str) -> str:
    """Return ``system_fingerprint``: equal fingerprints and seeds give equal tokens (the scope of DESIGN §1.3)."""
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
