"""`EndSlots`: what adapters change at the ends of a model, slot by slot: rows of the embedding, and logits.

An adapter may add a low-rank product to an end, scale it (DoRA), or bring a whole matrix of its own. Few adapters do,
so a slot's memory is allocated when it is written, and only rows whose adapter changes an end take part in its loops.
A row's bits depend on the row and its adapter alone, as in `kernels.lora`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from quire.kernels.linear import PackedLinear, linear, pack_empty, write_rows
from quire.kernels.lora import AdapterRows, LowRank
from quire.kernels.tape import between_segments
from quire.layers.weights import Build
from quire.weight_format import PLAIN

M = TypeVar("M", Tensor, PackedLinear)


@dataclass(frozen=True, slots=True)
class EndChange:
    """What an adapter does to one end: ``gain · (whole or the model's own) + scale · B A``."""

    low: LowRank | None = None  # A of the embedding is [vocab_size, rank], a row per id
    whole: Tensor | None = None  # [vocab_size, hidden_size], or the rank's rows of it


@dataclass(frozen=True, slots=True)
class _Held(Generic[M]):
    """The same, ready to use: a `PackedLinear` multiplies hidden states, of a tensor ids choose rows."""

    whole: M | None
    a: M | None = None  # embedding [vocab_size, rank]
    b: PackedLinear | None = None
    scale: float = 1.0
    gain: Tensor | None = None


class EndSlots:
    """Slots of the two ends, "embed_tokens" and "lm_head"; a pipeline stage writes those that it has."""

    def __init__(self, build: Build) -> None:
        self._dtype, self._backend = build.dtype, build.matrix_backend(PLAIN)
        self._device = torch.empty(0).device
        self._embedding: dict[int, _Held[Tensor]] = {}
        self._head: dict[int, _Held[PackedLinear]] = {}

    def write(self, slot: int, embedding: EndChange | None, head: EndChange | None) -> None:
        """Make this all that ``slot`` changes; None: nothing."""
        self._embedding.pop(slot, None)  # gives the memory back before more is taken
        self._head.pop(slot, None)
        with self._device:
            if embedding is not None:
                self._embedding[slot] = self._hold(embedding, self._table)
            if head is not None:
                self._head[slot] = self._hold(head, self._packed)

    def changes(self, rows: AdapterRows) -> bool:
        """Tell whether some of ``rows`` have an adapter that changes an end."""
        return bool(self._groups(self._embedding, rows) or self._groups(self._head, rows))

    def change_rows(self, ids: Tensor, rows: Tensor, adapters: AdapterRows) -> None:
        """Change ``rows [num_tokens, hidden_size]`` of the embedding, of ``ids [num_tokens]``, in place."""

        def change(ids: Tensor, rows: Tensor) -> None:
            for loaded, at in self._groups(self._embedding, adapters):
                own = ids[at, 0]
                y = rows[at] if loaded.whole is None else loaded.whole[own]
                if loaded.a is not None:
                    y = self._sum(y, loaded, loaded.a[own].float()).to(self._dtype)
                rows[at] = y

        _in_order(change, ids.unsqueeze(1), rows, lambda: bool(self._embedding))

    def change_logits(self, hidden: Tensor, logits: Tensor, adapters: AdapterRows) -> None:
        """Change ``logits [num_logits, vocab_size]`` fp32 of ``hidden [num_logits, hidden_size]`` in place."""

        def change(hidden: Tensor, logits: Tensor) -> None:
            for loaded, at in self._groups(self._head, adapters):
                x = hidden[at]
                y = logits[at] if loaded.whole is None else linear(x, loaded.whole, out_dtype=torch.float32)
                if loaded.a is not None:
                    y = self._sum(y, loaded, linear(x, loaded.a, out_dtype=torch.float32))
                logits[at] = y

        _in_order(change, hidden, logits, lambda: bool(self._head))

    def _sum(self, y: Tensor, loaded: _Held[M], low: Tensor) -> Tensor:
        """``gain · y + B (scale · low)`` in fp32; the scaled product is rounded to the model's type."""
        assert loaded.b is not None
        y = y.float() if loaded.gain is None else y.float() * loaded.gain
        return y + linear((low * loaded.scale).to(self._dtype), loaded.b, out_dtype=torch.float32)

    def _groups(self, slots: dict[int, _Held[M]], rows: AdapterRows) -> list[tuple[_Held[M], Tensor]]:
        """Return each slot that rows of this step have, with their indices."""
        groups = []
        for slot, loaded in slots.items():
            start, stop = rows.starts[[slot - 1, slot]].tolist() if slot < len(rows.starts) else (0, 0)
            if start < stop:
                groups.append((loaded, torch.from_numpy(rows.order[start:stop]).to(self._device)))
        return groups

    def _hold(self, change: EndChange, pack: Callable[[Tensor], M]) -> _Held[M]:
        weight, low = None if change.whole is None else pack(change.whole), change.low
        if low is None:
            return _Held(weight)
        gain = None if low.gain is None else low.gain.to(self._device)
        return _Held(weight, pack(low.a), self._packed(low.b), low.scale, gain)

    def _table(self, matrix: Tensor) -> Tensor:
        return matrix.to(self._device, self._dtype, copy=True)

    def _packed(self, matrix: Tensor) -> PackedLinear:
        out_features, in_features = matrix.shape
        packed = pack_empty(out_features, in_features, self._dtype, bias=False, backend=self._backend)
        write_rows(packed, 0, matrix.to(self._device, self._dtype))
        return packed


def _in_order(
    change: Callable[[Tensor, Tensor], None], x: Tensor, y: Tensor, when: Callable[[], bool]
) -> None:
    """Call ``change(x, y)`` now, or at its place in every replay of the step that is recorded, where ``when()``."""
    if not between_segments(change, x, y, when):
        change(x, y)
