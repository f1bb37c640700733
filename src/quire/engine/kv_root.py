"""`kv_root`: the name of everything that the bits of a KV block depend on, apart from its tokens.

Blocks that outlive the process are found again by other processes: the name holds the content of the model, not its
path, and whatever decides how that content is computed. Two engines with one name compute the same bits.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from operator import itemgetter

from quire.config import EngineConfig

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
