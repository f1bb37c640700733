"""Whole pages of the KV cache: copied (forks, copy-on-write tails) and cleared (first use)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.kvcopy import reference  # noqa: F401  registers
from quire.kernels.registry import Backend, find

__all__ = ["clear_pages", "copy_pages"]


def copy_pages(
    storage: torch.Tensor, moves: Sequence[tuple[int, int]], *, backend: Backend = "reference"
) -> None:
    """Copy pages ``(src, dst)`` of ``storage [num_blocks, page_elements]`` in list order.

    In order means: a page written by one move may be read by a later one.
    """
    find("copy_pages", backend)(storage, moves)


def clear_pages(storage: torch.Tensor, block_ids: torch.Tensor, *, backend: Backend = "reference") -> None:
    """Fill the pages ``block_ids [n]`` int64 of ``storage [num_blocks, page_elements]`` with zeros."""
    find("clear_pages", backend)(storage, block_ids)
