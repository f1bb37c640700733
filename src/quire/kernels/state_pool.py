"""States of recurrent layers: slots of one pool, and a step as the layers see it.

    storage  [num_slots, slot_elements] fp32        one row per slot: a live sequence, or a checkpoint
    slot     [state | past] of the first recurrent layer, then those of the next …
    state    [num_v_heads, k_head_dim, v_head_dim]
    past     [conv_kernel − 1, conv_channels]        the last rows that the convolution read, oldest first

So a copy of a slot is the copy of a row. States are fp32 whatever the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.modelspec import ModelSpec


@dataclass(frozen=True, slots=True)
class StateView:
    """One recurrent layer of the pool. Only the first stride may be larger than that of a contiguous tensor."""

    state: Tensor  # [num_slots, num_v_heads, k_head_dim, v_head_dim]
    past: Tensor  # [num_slots, conv_kernel − 1, conv_channels]


@dataclass(slots=True)
class StateBatch:
    """The sequences of a step with their slots, in the order of the step's tokens.

    Native calls read the arrays by address: a recorded step is replayed with all of them rewritten in place.
    """

    cu_seqlens: npt.NDArray[np.int64]  # [num_seqs + 1]
    slots: npt.NDArray[np.int64]  # [num_seqs]
    # 1: the sequence begins here, from zeros, whatever its slot holds. [num_seqs]
    fresh: npt.NDArray[np.int64]
    # (sequence, tokens of this step after which, slot): where copies of the state go, ascending. [num_saves, 3]
    saves: npt.NDArray[np.int64]
    views: Sequence[StateView]  # one per recurrent layer
    extents: npt.NDArray[np.int64] = field(init=False)  # [2]: num_seqs, num_saves

    def __post_init__(self) -> None:
        self.extents = np.array((len(self.slots), len(self.saves)), np.int64)

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def divided(self) -> bool:
        """Whether ranks divide the rows of a step: never, since a state needs every token in order."""
        return False

    def addresses(self) -> tuple[int, int, int, int, int]:
        """Return where cu_seqlens, slots, fresh, saves and extents lie."""
        arrays = (self.cu_seqlens, self.slots, self.fresh, self.saves, self.extents)
        assert all(array.dtype == np.int64 and array.flags.c_contiguous for array in arrays)
        first, *others = (array.ctypes.data for array in arrays)
        return (first, others[0], others[1], others[2], others[3])


def slot_elements(spec: ModelSpec) -> int:
    """Return the fp32 numbers of one slot, for the layers of ``spec`` (a rank's has its own heads and layers)."""
    layers = [layer.recurrent for layer in spec.layers if layer.recurrent is not None]
    return sum(r.state_elements + r.conv_elements for r in layers)


def view_states(storage: Tensor, spec: ModelSpec) -> tuple[StateView, ...]:
    """Return the views of each recurrent layer of ``spec`` into ``storage [num_slots, slot_elements]`` fp32."""
    assert storage.dtype == torch.float32
    assert storage.shape[1] == slot_elements(spec), (storage.shape, slot_elements(spec))
    views, start = [], 0
    for layer in spec.layers:
        if (r := layer.recurrent) is None:
            continue
        middle, end = start + r.state_elements, start + r.state_elements + r.conv_elements
        state = torch.unflatten(storage[:, start:middle], 1, (r.num_v_heads, r.k_head_dim, r.v_head_dim))
        past = torch.unflatten(storage[:, middle:end], 1, (r.conv_kernel - 1, r.conv_channels))
        views.append(StateView(state, past))
        start = end
    return tuple(views)
