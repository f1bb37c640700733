"""`LoraSlots`: the adapters that a worker holds, loaded into slots as plans say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire.config import LoraConfig
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.kernels.lora import LowRank, write_slot
from quire.layers.end_slots import EndChange
from quire.lora.adapter import AdapterFile, AdapterPart, read_adapter
from quire.models.decoder import Decoder
from quire.models.stored_weights import view
from quire.modelspec import ModelSpec
from quire.parallel.shard import Cut, Shard
from quire.request import Adapter

_AT_ONCE = 1 << 22  # weights that are expanded at once


class LoraSlots:
    """An adapter that cannot be loaded fails only the sequences that use it: `failure` says why, and first tries again,
    since the file may have come back.
    """

    def __init__(
        self, spec: ModelSpec, lora: LoraConfig, decoder: Decoder, shard: Shard | None = None,
        all_of: Callable[[bool], bool] = bool,
    ) -> None:  # fmt: skip
        """``shard``: what this rank has of the model that adapters are made for; None: ``spec`` is all of it.

        ``all_of``: whether something is so on every rank. An adapter that one of them cannot load is one that none has,
        or they would compute different rows.
        """
        self._all_of, self._shard = all_of, shard
        self._spec = spec if shard is None else shard.whole
        targets = decoder.lora_targets()
        self._cuts = {name: Cut(name) if shard is None else shard.cuts[f"{name}.weight"] for name in targets}
        self._targets = {
            self._cuts[name].name.removesuffix(".weight"): (name, targets[name]) for name in targets
        }
        self._stacks = list({id(target.stack): target.stack for target in targets.values()}.values())
        self._lora, self._stage, self._embedding = lora, decoder.stage, decoder.ends.embedding
        self._dtype = decoder.dtype
        self._held: dict[int, Adapter] = {}
        self._failed: dict[int, str] = {}

    @torch.inference_mode()  # a GPU's slots are inference tensors
    def load(self, slot: int, adapter: Adapter) -> None:
        """Make ``adapter`` the content of ``slot`` (from 1 on)."""
        self._held[slot] = adapter
        self._failed.pop(slot, None)
        why = None
        try:
            self._write(slot, _read_again(adapter, self._spec))
        except Exception as error:  # whatever it is, sequences of other adapters go on
            why = str(error)
        if not self._all_of(why is None):
            self._clear(slot)
            why = why or "another rank cannot read it"
            self._failed[slot] = f"The adapter {adapter.name!r} cannot be loaded: {why}"

    def failure(self, slot: int) -> str | None:
        """Return why ``slot`` cannot be used, or None."""
        if slot not in self._held:
            return f"adapter slot {slot} is empty."
        if slot in self._failed:
            self.load(slot, self._held[slot])
        return self._failed.get(slot)

    def _write(self, slot: int, file: AdapterFile) -> None:
        more = set(file.saved) - set(self._lora.saved)
        if more:
            raise ModelLoadError(f"it brings {min(more)} whole, and a slot has no room for that")
        stacks: dict[int, dict[int, LowRank]] = defaultdict(dict)
        for canonical, part in file.parts.items():
            if part.rank > self._lora.max_rank:
                raise ModelLoadError(f"its rank is {part.rank} and a slot has room for {self._lora.max_rank}")
            if canonical not in self._targets:
                continue  # an end, or of another pipeline stage
            name, target = self._targets[canonical]
            low = _low_rank(part, self._cuts[name], target.stack.dtype)
            if part.magnitude is not None:
                cut = self._cuts[name]
                if cut.columns is not None:
                    raise UnsupportedModelError(
                        f"DoRA of {canonical} needs whole rows of the matrix, and ranks have parts of them: start the "
                        "engine with tensor_parallel_size 1"
                    )
                exact = _low_rank(part, cut, torch.float32)
                norms = row_norms(lambda ids, t=target: t.linear.rows_of(t.part, ids), exact)  # type: ignore[misc]
                low = scaled(low, _magnitude(part, cut.rows) / norms, target.linear.bias_of(target.part))
            stacks[id(target.stack)][target.part_index] = low
        ends = self._embedding_change(file), self._head_change(file)
        for stack in self._stacks:
            write_slot(stack, slot, stacks.get(id(stack), {}))
        assert self._embedding.slots is not None
        self._embedding.slots.write(slot, *ends)

    def _embedding_change(self, file: AdapterFile) -> EndChange | None:
        part, saved = file.parts.get("embed_tokens"), file.saved.get("embed_tokens")
        if not self._stage.is_first or (part is None and saved is None):
            return None
        low = None if part is None else _low_rank(part, Cut("embed_tokens"), torch.float32)
        if part is not None and low is not None and part.magnitude is not None:
            if self._shard is not None and self._shard.topology.world_size > 1:
                raise UnsupportedModelError(
                    "DoRA of embed_tokens is not supported over several ranks: start the engine on one"
                )
            norms = column_norms(lambda ids: self._embedding.rows_of(ids).float().cpu(), low)
            low = scaled(low, _magnitude(part, None) / norms, None)
        return EndChange(
            None if low is None else replace(low, a=low.a.T), None if saved is None else view(saved)
        )

    def _head_change(self, file: AdapterFile) -> EndChange | None:
        part, saved = file.parts.get("lm_head"), file.saved.get("lm_head")
        if not self._stage.is_last or (part is None and saved is None):
            return None
        rows = None if self._shard is None else self._shard.vocab
        if rows is not None and not rows:
            return None  # a rank that has no ids
        low = None if part is None else _low_rank(part, Cut("lm_head", rows), torch.float32)
        if part is not None and low is not None and part.magnitude is not None:
            low = scaled(low, _magnitude(part, rows) / row_norms(self._embedding.head_rows_of, low), None)
        weight = None if saved is None else view(saved)
        return EndChange(low, weight if weight is None or rows is None else weight[rows.start : rows.stop])

    def _clear(self, slot: int) -> None:
        for stack in self._stacks:
            write_slot(stack, slot, {})
        assert self._embedding.slots is not None
        self._embedding.slots.write(slot, None, None)


def _read_again(adapter: Adapter, spec: ModelSpec) -> AdapterFile:
    """Read an adapter that is named by its content: a changed file would give wrong answers and poison the cache."""
    file = read_adapter(adapter.name, Path(adapter.path), spec)
    if file.adapter.key != adapter.key:
        raise ModelLoadError(
            f"{adapter.path} has changed since it was registered: unload it and load it again"
        )
    return file


def _low_rank(part: AdapterPart, cut: Cut, dtype: torch.dtype) -> LowRank:
    """Return the part of this rank: A's columns are the matrix's, B's rows its rows."""
    a, b = view(part.a), _rows_of(part, view(part.b))
    if cut.columns is not None:
        a = a[:, cut.columns.start : cut.columns.stop]
    if cut.rows is not None:
        b = b[cut.rows.start : cut.rows.stop]
    return LowRank(a.to(dtype), b.to(dtype), part.scale)


def _rows_of(part: AdapterPart, weight: Tensor) -> Tensor:
    """Return the rows of ``whole`` that are of the part's matrix, in its order."""
    first = part.rows[0]
    if len(part.rows) == 1:
        return weight[first.start : first.stop : first.step]
    return torch.cat([weight[rows.start : rows.stop : rows.step] for rows in part.rows])


def _magnitude(part: AdapterPart, rows: range | None) -> Tensor:
    assert part.magnitude is not None
    magnitude = _rows_of(part, view(part.magnitude)).float()
    return magnitude if rows is None else magnitude[rows.start : rows.stop]


def row_norms(rows_of: Callable[[Tensor], Tensor], low: LowRank) -> Tensor:
    """Return ``‖W + scale · B A‖`` of each row: fp32 ``[out_features]``. ``rows_of(ids)``: fp32 rows of W."""
    out_features, step = low.b.shape[0], max(2, _AT_ONCE // low.a.shape[1])
    norms = torch.empty(out_features)
    for first in range(0, out_features, step):
        ids = torch.arange(first, min(first + step, out_features))
        rows = rows_of(ids) + low.scale * (low.b[ids] @ low.a)
        norms[ids] = rows.double().square().sum(1).sqrt().float()
    return norms


def column_norms(rows_of: Callable[[Tensor], Tensor], low: LowRank) -> Tensor:
    """As `row_norms`, for an embedding: its rows are the columns of a linear from ids. fp32 ``[hidden_size]``."""
    hidden_size, vocab_size = low.b.shape[0], low.a.shape[1]
    total = torch.zeros(hidden_size, dtype=torch.float64)
    step = max(2, _AT_ONCE // hidden_size)
    for first in range(0, vocab_size, step):
        ids = torch.arange(first, min(first + step, vocab_size))
        rows = rows_of(ids) + low.scale * (low.a[:, ids].T @ low.b.T)
        total += rows.double().square().sum(0)
    return total.sqrt().float()


def scaled(low: LowRank, gain: Tensor, bias: Tensor | None) -> LowRank:
    """Return the DoRA ``gain · (W + scale · B A) x + bias`` (Liu et al. 2024, arXiv:2402.09353).

    The linear gives y with its bias in it, which must not be scaled: ``gain · y + (1 − gain) · bias``.
    """
    b = (low.b.float() * gain.unsqueeze(1)).to(low.b.dtype)
    return replace(low, b=b, gain=gain, offset=None if bias is None else (1.0 - gain) * bias)
