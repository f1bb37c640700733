"""Bytes that a rank sends in a step, over the tp and the pp axis. Torch-free.

`sent_per_row` is what one collective costs; `uses` lists the collectives of a step, from the slices that the layers are
built with. The cost model and the counter of `quire:rank_bytes_sent` share both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from quire.modelspec import DTYPE_BYTES
from quire.parallel.shard import Shard

Kind = Literal["all_reduce", "all_gather", "send"]
_SUMMED = (".attn.o.weight", ".mlp.down.weight", ".moe.shared.down.weight")  # fp32 until they are added up
_EXPERTS = ".moe.down.weight"  # the model's dtype


def sent_per_row(kind: Kind, size: int, ranks: int, taken: int, given: int) -> float:
    """Return the bytes that a rank writes per row of ``size`` elements.

    ``taken``, ``given``: bytes of an element before and after. In a sum a rank writes the others' parts of its own row,
    and then its part of the result; in the others its whole row, once.
    """
    if kind != "all_reduce":
        return float(size * taken)
    return size * ((ranks - 1) * taken + given) / ranks


@dataclass(frozen=True, slots=True)
class Use:
    """``count`` equal collectives in a step."""

    kind: Kind
    count: int
    row_bytes: float  # that the rank sends per row and collective
    of_logits: bool = False  # its rows are the sampled ones, else the step's tokens


def uses(shard: Shard, dtype: str) -> tuple[Use, ...]:
    """Return the collectives of a step of the rank that has ``shard``, with activations of ``dtype``."""
    assert shard.topology.cp == 1, shard.topology
    assert shard.topology.ep == 1, shard.topology
    ranks, hidden, item = shard.topology.tp, shard.whole.hidden_size, DTYPE_BYTES[dtype]
    found: list[Use] = []
    if ranks > 1:
        # After its attention the model's last layer goes on with the sampled rows alone.
        sampled = f"layers.{len(shard.layers) - 1}." if shard.is_last else "none"
        cut = [name for name, each in shard.cuts.items() if each.columns is not None]
        for of_logits in (False, True):
            names = [n for n in cut if (n.startswith(sampled) and ".attn." not in n) == of_logits]
            sums = sum(name.endswith(_SUMMED) for name in names)
            narrow = sum(name.endswith(_EXPERTS) for name in names) + (shard.is_first and not of_logits)
            for count, taken in ((sums, 4), (narrow, item)):
                row_bytes = sent_per_row("all_reduce", hidden, ranks, taken, item)
                found.append(Use("all_reduce", count, row_bytes, of_logits))
        if shard.is_last:
            found.append(Use("all_gather", 1, sent_per_row("all_gather", shard.max_vocab, ranks, 4, 4), True))
    if not shard.is_last:
        found.append(Use("send", 1, sent_per_row("send", 2 * hidden, 2, item, item)))
    return tuple(each for each in found if each.count)


def step_bytes(found: Iterable[Use], num_tokens: int, num_logits: int) -> float:
    """Return the bytes that a rank sends in a step."""
    return sum(use.count * use.row_bytes * (num_logits if use.of_logits else num_tokens) for use in found)


class BytesSent:
    """Counts what a rank's collectives send. The calls of a recorded step count once per replay."""

    def __init__(self) -> None:
        self.total = 0.0
        self._recorded: dict[int, float] = {}  # rows of a recorded call → bytes per row, of all of them
        self._is_recording = False
        self._limits = 0, 0  # rows that stand for the step's tokens and for its logits

    def add(self, rows: int, row_bytes: float) -> None:
        """Count a call with ``rows`` rows."""
        if self._is_recording:
            self._recorded[rows] = self._recorded.get(rows, 0.0) + row_bytes
        else:
            self.total += rows * row_bytes

    @contextmanager
    def recording(self, max_tokens: int, max_logits: int) -> Iterator[None]:
        """Note the calls of a step that is recorded with this many rows, and computes nothing."""
        self._recorded, self._limits, self._is_recording = {}, (max_tokens, max_logits), True
        try:
            yield
        finally:
            self._is_recording = False

    def replayed(self, num_tokens: int, num_logits: int) -> None:
        """Count a replay of the recorded step."""
        tokens, logits = (self._recorded.get(limit, 0.0) for limit in self._limits)
        self.total += num_tokens * tokens + num_logits * logits
