"""A worker's memory: the storage of the KV cache.

Storage on a CPU is anonymous memory: the system gives a page, zeroed, when it is first touched, so a large pool costs
nothing until it is used. `PagesAhead` has it give those that are next while no step runs. `quire.resolve` decides how
many blocks there are.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from quire.errors import ConfigError
from quire.kernels.kv_blocks import KvView, can_tile, clear_blocks, copy_blocks, view_layer
from quire.kernels.registry import GPU_KERNELS, NATIVE_LEVELS, KernelChoice
from quire.kernels.threads import PAUSE_S, BetweenSteps
from quire.kernels.workspace import HUGE
from quire.kv_layout import KV_CODE_BITS, KvLayout
from quire.modelspec import ModelSpec
from quire.parallel.stripe import Stripe

if TYPE_CHECKING:
    from quire.kernels.kv_codes import KvCodes

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BYTES = dict.fromkeys(KV_CODE_BITS, torch.int8) | {"fp8": torch.float8_e4m3fn}
_CPU = torch.device("cpu")
_MADV_POPULATE_WRITE = 23  # Linux 5.14
# Steps of the largest size whose pages are there before they are used.
AHEAD_STEPS = 4
AHEAD_BYTES = 256 << 20  # most pages that are not used yet
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's mallopt


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a config's dtype name."""
    if name not in _TORCH:
        raise ConfigError(f"dtype {name!r} is not one of {', '.join(sorted(_TORCH))}.")
    return _TORCH[name]


def keep_freed_memory(limit_bytes: int = 64 << 20) -> bool:
    """Let the allocator keep up to ``limit_bytes`` of what a step frees, for the next step to use again.

    glibc returns tensors of a few MiB to the system at once, and every step then pays for their pages again: a quarter
    of the time of the reference attention (measured). Returns whether this C library has the setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, limit_bytes // 2) and mallopt(_M_TRIM_THRESHOLD, limit_bytes))


class KvCache:
    """Blocks of all layers that attend: ``storage [num_blocks, block_elements]`` (see `kernels.kv_blocks`)."""

    def __init__(
        self, spec: ModelSpec, layout: KvLayout, num_blocks: int, block_size: int, dtype: str, kernels: KernelChoice,
        device: torch.device = _CPU, stripe: Stripe | None = None, factors: Mapping[int, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        """``stripe``: the positions that ``block_size`` counts; None: all. ``factors``: `KvCodes.factors` by layer."""
        kind = _BYTES[dtype] if dtype in _BYTES else torch_dtype(dtype)
        block_elements = layout.block_bytes(block_size, dtype) // kind.itemsize
        if device.type == "cpu":
            self.storage = reserve(num_blocks, block_elements, kind)
        else:
            self.storage = torch.zeros(num_blocks, block_elements, dtype=kind, device=device)
        attends = kernels.backend("attention")
        # Attention on a GPU does not read what no token may see, so what lies there does not matter.
        masks = attends in GPU_KERNELS
        coded = dtype in KV_CODE_BITS and not masks
        tiles = attends in NATIVE_LEVELS or coded
        codes = import_module("quire.kernels.kv_codes").by_layer(dtype, factors or {}) if coded else None
        self.views: tuple[KvView, ...] = tuple(
            _view(self.storage, spec, layout, index, block_size, tiles, stripe, codes)
            for index, layer in enumerate(spec.layers)
            if layer.attn is not None
        )
        # Blocks in tiles need no `clear`: storing the first position of a tile clears it.
        self.needs_clear = not masks and any(view.layout == "rows" for view in self.views)
        self.token_bytes = self.storage[0].nbytes * len(layout.groups) // block_size
        self.num_used = 0  # blocks up to the last that a sequence ever got

    def note_used(self, block_ids: Sequence[int]) -> None:
        """Sequences get blocks, of which there is one at least. The pool hands new ones out in ascending order."""
        self.num_used = max(self.num_used, max(block_ids) + 1)

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in list order."""
        copy_blocks(self.storage, moves)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks that a sequence just got: what another left there might be inf or NaN, and 0 · NaN is NaN."""
        clear_blocks(self.storage, torch.tensor(block_ids, dtype=torch.int64))


def _view(
    storage: torch.Tensor, spec: ModelSpec, layout: KvLayout, index: int, block_size: int, tiles: bool,
    stripe: Stripe | None, codes: Callable[[int], KvCodes] | None,
) -> KvView:  # fmt: skip
    a, (_, slot) = spec.layers[index].attention, layout.group_of_layer(spec.kv_source(index))
    heads, dim, v_dim = a.num_kv_heads, a.head_dim, a.v_head_dim
    if a.is_mla:
        heads, dim, v_dim = 1, a.kv_elements_per_token, a.kv_lora_rank
    tiles = tiles and can_tile(storage.dtype, block_size, dim, v_in_k=a.is_mla)
    return view_layer(
        storage, slot, num_kv_heads=heads, block_size=block_size, head_dim=dim, v_head_dim=v_dim, v_in_k=a.is_mla,
        layout="tiles" if tiles else "rows", stripe=stripe,
        codes=None if codes is None else codes(spec.kv_source(index)),
    )  # fmt: skip


def reserve(num_blocks: int, block_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Map zeroed memory without touching it; pages of 2 MiB where the pool is large (they read 9 … 25 % faster)."""
    assert num_blocks > 0
    size = num_blocks * block_elements * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"The KV cache of {size / 2**30:.2f} GiB ({num_blocks} blocks) cannot be mapped: {error}; ask for a "
            "smaller one with --kv-memory."
        ) from error
    if size >= 16 * HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(num_blocks, block_elements)


class PagesAhead:
    """Has the system give the pages of the cache that come next, on a thread, while no step runs.

    Else the step that first writes to a page waits for it: 0.1 ms for 2 MiB that a virtual machine had already, and
    5 ms where its host had taken them back (benchmarks/results/startup-2026-11-23.md).
    Asking for a page changes nothing that is written in it, so a step may begin meanwhile.
    """

    def __init__(self, kv: KvCache, between: BetweenSteps, max_tokens: int) -> None:
        """``max_tokens``: of a step."""
        self._kv, self._between = kv, between
        self._ahead = min(AHEAD_BYTES, AHEAD_STEPS * max_tokens * kv.token_bytes)
        self._ready = 0 if sys.platform == "linux" else kv.storage.nbytes  # bytes; those before are there
        self.thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin if fewer than half of the pages ahead are there."""
        if self._ready < self._until(self._ahead // 2) and (
            self.thread is None or not self.thread.is_alive()
        ):
            # Not of a lower priority: it holds a lock of the process's memory while it has a page given.
            self.thread = threading.Thread(target=self._run, name="pages ahead", daemon=True)
            self.thread.start()

    def join(self) -> None:
        """Wait for the thread to end."""
        if self.thread is not None:
            self.thread.join()

    def _until(self, ahead: int) -> int:
        """The end of ``ahead`` bytes behind the blocks in use."""
        storage = self._kv.storage
        return min(storage.nbytes, self._kv.num_used * storage[0].nbytes + ahead)

    def _run(self) -> None:
        while self._between.wait(PAUSE_S):
            begin, end = max(self._ready, self._until(0)), self._until(self._ahead)
            if begin >= end:
                return
            size = min(HUGE, end - begin)
            self._ready = begin + size if self._populate(begin, size) else self._kv.storage.nbytes

    def _populate(self, begin: int, size: int) -> bool:
        """Whether the system knows the call and has the memory."""
        address = self._kv.storage.data_ptr() + begin
        start = address - address % mmap.PAGESIZE
        call = ctypes.CDLL(None).madvise
        return not call(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), _MADV_POPULATE_WRITE)
