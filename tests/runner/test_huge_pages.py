"""Memory that kernels read from end to end is asked of the system in pages of 2 MiB."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from quire.kernels.workspace import huge_zeros, mapped
from quire.runner.memory import reserve

SMAPS = Path("/proc/self/smaps")


def flags_of(tensor: torch.Tensor) -> set[str]:
    """Return the flags of the mapping that a tensor lies in; "hg" stands for huge pages that were asked for."""
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
        if (span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry)) is None:
            continue
        begin, end = (int(word, 16) for word in span.groups())
        if begin <= tensor.data_ptr() < end:
            found = re.search(r"VmFlags: (.*)", entry)
            return set(found[1].split()) if found is not None else set()
    raise AssertionError("the tensor lies in no mapping")


def asks_for_huge_pages(tensor: torch.Tensor) -> bool:
    return "hg" in flags_of(tensor)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or "VmFlags" not in SMAPS.read_text(),
    reason="needs Linux with huge pages",
)
def test_large_memory_that_is_read_whole_has_huge_pages() -> None:
    assert asks_for_huge_pages(reserve(4, 16 << 20, torch.bfloat16))
    assert asks_for_huge_pages(huge_zeros(100 << 20, dtype=torch.uint8))
    assert asks_for_huge_pages(huge_zeros(1000, dtype=torch.float32)), "small matrices share them"
    assert not asks_for_huge_pages(mapped(8 << 20, dtype=torch.uint8)), "it comes page by page"
    assert not asks_for_huge_pages(reserve(4, 1 << 20, torch.bfloat16)), "a pool of a few blocks"
