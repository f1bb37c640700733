"""`ExpertBalancer`: moves the experts of a rank between steps, with the other ranks of the ep axis.

All ranks route the same rows, so all have the same counts and come to the same placement without asking each other.
After every ``step_interval`` steps the layers are looked at, one before each step: a step waits for the experts of one
layer at most. A move changes no bits: an expert's product does not depend on the rank that computes it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quire.config import ExpertsConfig
from quire.kernels.moe import ExpertPlaces
from quire.layers.mlp import MoeBlock
from quire.metrics.engine_stats import LayerLoad
from quire.parallel.balance import Move, balance, imbalance, keep, moves, rank_loads

MIN_GAIN = 0.02  # of the largest rank's share, for which experts are moved


class ExpertBalancer:
    """Every rank of the axis has one, and calls it before the same steps."""

    def __init__(
        self, blocks: Mapping[int, MoeBlock], config: ExpertsConfig, num_nodes: int,
        report: Callable[[LayerLoad], None],
    ) -> None:  # fmt: skip
        """``blocks``: by the number of their layer; ``report`` gets the load of each layer once per interval."""
        self._blocks, self._config, self._num_nodes, self._report = blocks, config, num_nodes, report
        self._counted = {layer: _places(block).loads.clone() for layer, block in blocks.items()}
        self._windows: deque[tuple[int, list[int]]] = (
            deque()
        )  # layers still to be looked at, and their tokens
        self._num_steps = 0

    @torch.inference_mode()
    def before_step(self) -> None:
        """Balance the next layer, if any; every rank must have computed the steps before."""
        if self._num_steps % self._config.step_interval == 0 and self._num_steps and not self._windows:
            for layer, block in self._blocks.items():
                loads = _places(block).loads
                self._windows.append((layer, (loads - self._counted[layer]).tolist()))
                self._counted[layer] = loads.clone()
        self._num_steps += 1
        if self._windows:
            self._balance(*self._windows.popleft())

    def _balance(self, layer: int, loads: list[int]) -> None:
        block = self._blocks[layer]
        places = _places(block)
        num_ranks, old = places.group.size, places.slots
        nodes = self._num_nodes if num_ranks % self._num_nodes == 0 else 1
        before = after = imbalance(rank_loads(old, loads, num_ranks))
        todo: list[Move] = []
        if self._config.moves:
            wanted = balance(loads, len(old), num_ranks, num_groups=block.num_groups, num_nodes=nodes)
            reached = imbalance(rank_loads(wanted, loads, num_ranks))
            if reached < before * (1 - MIN_GAIN):
                new = keep(old, wanted, num_ranks, nodes)
                todo, after = moves(old, new, num_ranks), reached
                move_experts(block, todo)
                places.place(new)
        self._report(LayerLoad(layer, sum(loads), imbalance(loads), before, after, len(todo)))


def move_experts(block: MoeBlock, todo: list[Move]) -> None:
    """Copy experts from slot to slot, on this rank and between ranks; all ranks have the same list."""
    places = _places(block)
    group, size = places.group, places.per_rank
    num_bytes = sum(map(len, map(_bytes, block.expert_tensors(0))))
    arrived: list[tuple[int, Tensor]] = []
    for source, target in todo:
        sender, receiver = source // size, target // size
        buffer = torch.empty(num_bytes, 1, dtype=torch.uint8)
        if sender == group.index:
            parts = [_bytes(part) for part in block.expert_tensors(source % size)]
            torch.cat(parts, out=buffer.view(-1))
        if sender != receiver:
            group.gather_parts(buffer, [0] * (sender + 1) + [num_bytes] * (group.size - sender))
        if receiver == group.index:
            arrived.append((target % size, buffer.view(-1)))
    for slot, buffer in arrived:  # after the last one was read
        start = 0
        for part in block.expert_tensors(slot):
            flat = _bytes(part)
            flat.copy_(buffer[start : start + len(flat)])
            start += len(flat)


def _bytes(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), tensor.shape
    return tensor.view(-1).view(torch.uint8) if math.prod(tensor.shape) else tensor.new_empty(0).byte()


def _places(block: MoeBlock) -> ExpertPlaces:
    assert block.places is not None
    return block.places
