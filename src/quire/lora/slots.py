"""`LoraSlots`: the adapters that a worker holds, loaded into slots as plans say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from quire.errors import ModelLoadError
from quire.kernels.lora import LoraStack, LowRank, write_slot
from quire.lora.adapter import AdapterFile, AdapterPart, read_adapter
from quire.models.stored_weights import view
from quire.modelspec import ModelSpec
from quire.parallel.shard import Cut, Shard
from quire.request import Adapter


class LoraSlots:
    """``targets``: "layers.0.attn.q" … → (the stack of its linear, index of the part).

    An adapter that cannot be loaded fails only the sequences that use it: `failure` says why, and first tries again,
    since the file may have come back.
    """

    def __init__(
        self, spec: ModelSpec, targets: Mapping[str, tuple[LoraStack, int]], shard: Shard | None = None,
        all_of: Callable[[bool], bool] = bool,
    ) -> None:  # fmt: skip
        """``shard``: what this rank has of the model that adapters are made for; None: ``spec`` is all of it.

        ``all_of``: whether something is so on every rank. An adapter that one of them cannot load is one that none has,
        or they would compute different rows.
        """
        self._all_of = all_of
        self._spec = spec if shard is None else shard.whole
        self._cuts = {name: Cut(name) if shard is None else shard.cuts[f"{name}.weight"] for name in targets}
        self._targets = {
            self._cuts[name].name.removesuffix(".weight"): (name, *targets[name]) for name in targets
        }
        self._stacks = list({id(stack): stack for stack, _ in targets.values()}.values())
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
        stacks: dict[int, dict[int, LowRank]] = defaultdict(dict)
        for canonical, part in file.parts.items():
            if canonical not in self._targets:
                continue  # of another pipeline stage
            name, stack, index = self._targets[canonical]
            if part.rank > stack.max_rank:
                raise ModelLoadError(f"its rank is {part.rank} and a slot has room for {stack.max_rank}")
            stacks[id(stack)][index] = _low_rank(part, self._cuts[name], stack.dtype)
        for stack in self._stacks:
            write_slot(stack, slot, stacks.get(id(stack), {}))

    def _clear(self, slot: int) -> None:
        for stack in self._stacks:
            write_slot(stack, slot, {})


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
    a, b = view(part.a), view(part.b)[part.rows]
    if cut.columns is not None:
        a = a[:, cut.columns.start : cut.columns.stop]
    if cut.rows is not None:
        b = b[cut.rows.start : cut.rows.stop]
    return LowRank(a.to(dtype), b.to(dtype), part.scale)
