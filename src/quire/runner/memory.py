"""The KV cache's storage, and how the worker's process holds its memory.

Storage is anonymous memory: the system gives a page, zeroed, when it is first touched, so a large pool costs nothing
until it is used. How many blocks there are is decided before (`quire.resolve`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch

from quire.errors import ConfigError
from quire.kernels.kv_blocks import KvView, can_tile, clear_blocks, copy_blocks, view_layer
from quire.kernels.registry import GPU_KERNELS, NATIVE_LEVELS, KernelChoice
from quire.modelspec import DTYPE_BYTES, KvLayout, ModelSpec

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_CPU = torch.device("cpu")
_HUGE = 2 << 20  # bytes of a huge page
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a config's dtype name."""
    if name not in _TORCH:
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(sorted(_TORCH))}.")
    return _TORCH[name]


def keep_freed_memory(limit_bytes: int = 64 << 20) -> bool:
    """Let the allocator keep up to ``limit_bytes`` of what a step frees, for the next step to use again.

    glibc returns tensors of a few MiB to the system at once, and every step then pays for their pages anew: a quarter
    of the time of the reference attention (measured). Returns whether this C library has the knob.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, limit_bytes // 2) and mallopt(_M_TRIM_THRESHOLD, limit_bytes))


class KvCache:
    """Blocks of all layers: ``storage [num_blocks, block_elements]``. `kernels.kv_blocks` says what a block holds."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: KvLayout,
        num_blocks: int,
        block_size: int,
        dtype: str,
        kernels: KernelChoice,
        device: torch.device = _CPU,
    ) -> None:
        block_elements = layout.block_bytes(block_size, dtype) // DTYPE_BYTES[dtype]
        kind = _EIGHT_BITS.get(dtype) or torch_dtype(dtype)
        if device.type == "cpu":
            self.storage = _reserve(num_blocks, block_elements, kind)
        else:
            self.storage = torch.zeros(num_blocks, block_elements, dtype=kind, device=device)
        attends = kernels.backend("attention")
        self._masks = attends in GPU_KERNELS  # what no row sees is not read, so rubbish does not matter
        tiles = attends in NATIVE_LEVELS or (dtype == "int8" and not self._masks)
        self.views: tuple[KvView, ...] = tuple(
            _view(self.storage, spec, layout, index, block_size, tiles) for index in range(spec.num_layers)
        )

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in list order."""
        copy_blocks(self.storage, moves)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks that a sequence just got: another may have left inf or NaN there, and 0 · NaN is NaN.

        Tiles need no clearing, because storing the first position of a tile clears it.
        """
        if block_ids and not self._masks and any(view.layout == "rows" for view in self.views):
            clear_blocks(self.storage, torch.tensor(block_ids, dtype=torch.int64))


def _view(
    storage: torch.Tensor, spec: ModelSpec, layout: KvLayout, index: int, block_size: int, tiles: bool
) -> KvView:
    a = spec.layers[index].attention
    _, slot = layout.group_of_layer(index)
    if a.is_mla:
        return view_layer(
            storage,
            slot,
            num_kv_heads=1,
            block_size=block_size,
            head_dim=a.kv_elements_per_token,
            v_head_dim=a.kv_lora_rank,
            v_in_k=True,
        )
    tiles = tiles and can_tile(storage.dtype, block_size, a.head_dim, v_in_k=False)
    return view_layer(
        storage,
        slot,
        num_kv_heads=a.num_kv_heads,
        block_size=block_size,
        head_dim=a.head_dim,
        v_head_dim=a.v_head_dim,
        layout="tiles" if tiles else "rows",
    )


def _reserve(num_blocks: int, block_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Map zeroed memory without touching it; 2 MiB pages where the pool is large (they read 9 … 25 % faster)."""
    assert num_blocks > 0
    size = num_blocks * block_elements * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"The KV cache of {size / 2**30:.2f} GiB ({num_blocks} blocks) cannot be mapped: {error}; ask for a "
            "smaller one with --kv-memory."
        ) from error
    if size >= 16 * _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(num_blocks, block_elements)
