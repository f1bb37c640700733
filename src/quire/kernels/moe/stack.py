"""The matrices of all experts of a block, alike in shape, format and backend."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.kernels.activation import ActivationKind
from quire.kernels.linear import PackedLinear


@dataclass(slots=True)
class ExpertStack:
    """``gate_up[e]`` is ``[2 · intermediate, hidden]``, ``down[e]`` is ``[hidden, intermediate]``."""

    gate_up: Sequence[PackedLinear]
    down: Sequence[PackedLinear]
    activation: ActivationKind
    # What a backend made of the matrices at the first call; they stay where they are.
    addresses: tuple[array[int], array[int]] | None = field(default=None, repr=False)
