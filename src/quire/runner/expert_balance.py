"""`ExpertBalancer`: moves the experts of a rank between steps, with the other ranks of the ep axis.

All ranks route the same rows, so all have the same counts and come to the same placement without asking each other.
After every ``step_interval`` steps the layers are looked at, one after another. Before a step a few experts are sent;
they take their slots once the last one of their layer has arrived. A move changes no bits: an expert's product does not
depend on the rank that computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from quire.config import ExpertsConfig
from quire.kernels.moe import ExpertPlaces
from quire.layers.moe import MoeBlock
from quire.metrics.engine_stats import LayerLoad
from quire.metrics.log import Log
from quire.parallel.balance import Move, balance, imbalance, keep, moves, rank_loads

# Experts are moved for this much of the largest rank's share.
MIN_GAIN = 0.02
STEP_BYTES = 16 << 20  # sent before one step, or one expert

log = Log("experts")


class ExpertBalancer:
    """Every rank of the axis has one, and calls it before the same steps."""

    def __init__(
        self, blocks: Mapping[int, MoeBlock], config: ExpertsConfig, num_nodes: int,
        report: Callable[[LayerLoad], None],
    ) -> None:  # fmt: skip
        """``blocks``: by the number of their layer; ``report`` gets the load of each layer once per interval."""
        self._blocks, self._config, self._num_nodes, self._report = blocks, config, num_nodes, report
        self._counted = {layer: _places(block).loads.clone() for layer, block in blocks.items()}
        self._work: Iterator[None] = iter(())
        self._num_steps = 0

    @torch.inference_mode()
    def before_step(self) -> None:
        """Go on with balancing, if it is time; every rank must have computed the steps before."""
        is_busy = next(self._work, self) is None
        if not is_busy and self._num_steps and self._num_steps % self._config.step_interval == 0:
            windows = []
            for layer, block in self._blocks.items():
                loads = _places(block).loads.clone()
                windows.append((layer, (loads - self._counted[layer]).tolist()))
                self._counted[layer] = loads
            self._work = (None for layer, loads in windows for _ in self._balance(layer, loads))
        self._num_steps += 1

    def _balance(self, layer: int, loads: list[int]) -> Iterator[None]:
        """Balance a layer that had ``loads``; yields wherever a step may be computed."""
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
                yield from move_experts(block, todo)
                places.place(new)
        log.debug("expert_load", layer=layer, tokens=loads, moved=len(todo))
        self._report(LayerLoad(layer, sum(loads), imbalance(loads), before, after, len(todo)))
        yield


def move_experts(block: MoeBlock, todo: list[Move], step_bytes: int = STEP_BYTES) -> Iterator[None]:
    """Copy experts from slot to slot, on this rank and between ranks; all ranks have the same list.

    Yields after every ``step_bytes``, before it writes the first slot.
    """
    places = _places(block)
    group, size = places.group, places.per_rank
    num_bytes = sum(len(_bytes(part)) for part in block.expert_tensors(0))
    arrived: list[tuple[int, Tensor]] = []
    for number, (source, target) in enumerate(todo, 1):
        sender, receiver = source // size, target // size
        buffer = torch.empty(num_bytes, 1, dtype=torch.uint8)
        if sender == group.index:
            torch.cat([_bytes(part) for part in block.expert_tensors(source % size)], out=buffer.view(-1))
        if sender != receiver:
            group.gather_parts(buffer, [0] * (sender + 1) + [num_bytes] * (group.size - sender))
        if receiver == group.index:
            arrived.append((target % size, buffer.view(-1)))
        if number % max(1, step_bytes // num_bytes) == 0:
            yield
    for slot, buffer in arrived:
        start = 0
        for part in block.expert_tensors(slot):
            flat = _bytes(part)
            flat.copy_(buffer[start : start + len(flat)])
            start += len(flat)


def _bytes(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), tensor.shape
    return tensor.view(-1).view(torch.uint8)


def _places(block: MoeBlock) -> ExpertPlaces:
    assert block.places is not None
    return block.places
