"""Planted faults in how memory is asked for: what is slower then gives the same tokens, so no other test sees it."""

from __future__ import annotations

from mutant import Mutant

HUGE_PAGES = ("tests/runner/test_huge_pages.py::test_large_memory_that_is_read_whole_has_huge_pages",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "cache-in-small-pages",
        "a large KV cache lies in pages of 4 KiB",
        "src/quire/runner/memory.py",
        "memory.madvise(mmap.MADV_HUGEPAGE)",
        "memory.madvise(mmap.MADV_NORMAL)",
        HUGE_PAGES,
    ),
    Mutant(
        "weights-in-small-pages",
        "packed weights lie in pages of 4 KiB",
        "src/quire/kernels/workspace.py",
        "memory.madvise(mmap.MADV_HUGEPAGE)",
        "memory.madvise(mmap.MADV_NORMAL)",
        HUGE_PAGES,
    ),
)
