"""Block sizes of the Triton kernels, by GPU, op and shape: a table that `benchmarks/gpu/tune.py` writes.

Nothing is tuned at start-up. ``block_size_tables/<GPU>.json`` maps op → shape → sizes; a shape without an entry takes
the op's "all", and a GPU without a file takes the defaults below. Sizes of invariant versions are part of the result,
so they are constants and no table changes them.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path

import torch

Sizes = dict[str, int]
FOLDER = Path(__file__).parent / "block_size_tables"

DEFAULTS: dict[str, Sizes] = {
    "attention_decode": {"keys": 64, "warps": 4},
    "attention_prefill": {"rows": 64, "keys": 64, "warps": 4, "stages": 3},
    "attention_invariant": {"keys": 64, "warps": 4},
    "plain_few": {"columns": 0},  # none: up to 16 rows take the product for any number of rows
    "fp8_few": {"columns": 0},
    "int4_g128_few": {"columns": 0},
    "int8_few": {"columns": 0},
    "int_linear_small": {"rows": 16, "columns": 64, "inner": 128, "warps": 4, "stages": 3, "programs": 264},
    "int_linear_large": {"rows": 64, "columns": 128, "inner": 64, "warps": 4, "stages": 2},
    "matmul_invariant": {"rows": 64, "columns": 128, "inner": 64, "warps": 4, "stages": 4},
    "grouped_small": {"rows": 16, "columns": 64, "inner": 128, "warps": 4, "stages": 4},
    "grouped_large": {"rows": 64, "columns": 128, "inner": 64, "warps": 8, "stages": 3},
    "fp8_linear_small": {"rows": 16, "columns": 64, "inner": 128, "warps": 4, "stages": 4},
    "fp8_linear_large": {"rows": 64, "columns": 128, "inner": 128, "warps": 4, "stages": 3},
}
INVARIANT = ("attention_invariant", "matmul_invariant")


def block_sizes(op: str, shape: str) -> Sizes:
    """Return the sizes of ``op`` for ``shape`` (a key as the op writes it) on the GPU of this process."""
    if op in INVARIANT:
        return DEFAULTS[op]
    sizes = sizes_table(gpu_name()).get(op, {})
    return sizes.get(shape) or sizes.get("all") or DEFAULTS[op]


@lru_cache(maxsize=1)
def gpu_name() -> str:
    """The GPU as a file name: ``NVIDIA_H200``; "interpreter" without one."""
    if not torch.cuda.is_available():
        return "interpreter"
    return re.sub(r"[^A-Za-z0-9]+", "_", torch.cuda.get_device_name()).strip("_")


@lru_cache(maxsize=8)
def sizes_table(gpu: str, folder: Path = FOLDER) -> dict[str, dict[str, Sizes]]:
    """Read a GPU's table; empty where there is none."""
    path = folder / f"{gpu}.json"
    if not path.is_file():
        return {}
    table: dict[str, dict[str, Sizes]] = json.loads(path.read_text())
    unknown = set(table) - set(DEFAULTS)
    assert not unknown, f"{path}: unknown ops {sorted(unknown)}"
    return table
