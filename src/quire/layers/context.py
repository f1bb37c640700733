"""Context parallelism: the ranks that share each sequence's cache (`parallel.stripe`), and what they exchange.

Every rank computes a step's attention over its own positions, and the partial results are summed in the order of the
ranks. The rest of a layer needs no other rows, so in a large step (a prompt chunk) the ranks divide it: token t is
computed by rank ``t mod ranks``. Keys, values and queries are then gathered, and a rank gets the partial results of its
own tokens alone. A row has the same bits either way, since no op of a layer lets rows see each other.

    small step   every rank: all rows … q, k, v │ attention here │ all_gather, merge │ all rows …
    large step   every rank: own rows … │ all_gather q, k, v │ attention here │ all_to_all, merge │ own rows …

The stripes make the division even: with whole parts of the prompt per rank, as in ring attention (Liu et al. 2023,
arXiv:2310.01889), causal attention would leave the first rank idle, or need a zig-zag order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.attention.batch import AttentionShape, RaggedBatch
from quire.kernels.attention.striped import merge_attention, partial_attention
from quire.kernels.collective import Collectives, Group
from quire.kernels.kv_blocks import KvView
from quire.kernels.registry import KernelChoice
from quire.parallel.shard import Shard
from quire.parallel.stripe import DIVIDE_FROM, Stripe


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """The ranks that share the caches of sequences, and what this one has of them."""

    group: Group
    stripe: Stripe

    def divides(self, num_tokens: int) -> bool:
        """Whether the ranks divide the rows of a step."""
        return num_tokens >= DIVIDE_FROM * self.group.size

    def own(self, x: Tensor) -> Tensor:
        """Return this rank's rows of ``x [num_tokens, …]``. The last is repeated where not all ranks have one more."""
        size = self.group.size
        tokens = torch.arange(self.group.index, -(-x.shape[0] // size) * size, size)
        return x.index_select(0, tokens.clamp_max_(x.shape[0] - 1))

    def gather(self, x: Tensor, num_tokens: int) -> Tensor:
        """``x [own rows, size]`` of each rank → ``[num_tokens, size]``."""
        width = x.shape[1]
        return self.group.all_gather(x).view(-1, width)[:num_tokens]

    def exchange(self, x: Tensor) -> Tensor:
        """``x [num_tokens, size]`` of each rank → this rank's rows of all: ``[own rows, ranks · size]``."""
        ranks, (num_tokens, width) = self.group.size, x.shape
        if missing := -num_tokens % ranks:
            x = torch.cat((x, x[-1:].expand(missing, width)))
        return self.group.all_to_all(x.view(-1, ranks * width))


def context_parallel(groups: Collectives, shard: Shard, block_size: int) -> ContextParallel | None:
    """Return the ranks that share caches with this one, if there are others; ``block_size``: the scheduler's."""
    group, stripe = groups.group("cp"), shard.stripe(block_size)
    return None if group is None or stripe is None else ContextParallel(group, stripe)


class StripedAttention:
    """In place of the op `attention`, where the cache is striped."""

    def __init__(self, cp: ContextParallel, kernels: KernelChoice) -> None:
        self._cp = cp
        self._partial, self._merge = kernels.of(partial_attention), kernels.of(merge_attention)

    def __call__(
        self, q: Tensor, kv: KvView, batch: RaggedBatch, shape: AttentionShape, sinks: Tensor | None,
        *, divided: bool = False,
    ) -> Tensor:  # fmt: skip
        """As `attention`; where the rows are ``divided``, the result has this rank's alone."""
        ranks, heads = self._cp.group.size, q.shape[1]
        part = self._partial(q, kv, batch, shape).flatten(1)
        parts = self._cp.exchange(part) if divided else self._cp.group.all_gather(part)
        return self._merge(parts.view(parts.shape[0], ranks, heads, -1), sinks, q.dtype)
