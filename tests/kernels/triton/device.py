"""Where the Triton kernels run in these tests: on the GPU, else in Triton's interpreter. Imported before any kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels of a GPU need Triton: pip install -e '.[dev]' has it")

from tests.kernels.cases import AttentionInputs

import quire.kernels.triton_ops  # noqa: F401  registers
from quire.kernels.kv_blocks import KvView

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WARNINGS = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of lanes that are masked


def on_device(made: AttentionInputs) -> AttentionInputs:
    sinks = None if made.sinks is None else made.sinks.to(DEVICE)
    return replace(made, q=made.q.to(DEVICE), kv=moved(made.kv), sinks=sinks)


def moved(kv: KvView) -> KvView:
    """The same cache on the device: all of its storage, since pieces are a slice of blocks."""
    if DEVICE.type == "cpu":
        return kv
    pieces = kv.pieces
    bits = torch.empty(0, dtype=torch.int8).set_(pieces.untyped_storage()).to(DEVICE).view(pieces.dtype)
    return replace(kv, pieces=bits.as_strided(pieces.shape, pieces.stride(), pieces.storage_offset()))
