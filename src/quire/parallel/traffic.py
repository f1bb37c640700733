"""Bytes that a rank sends in a step: the one function of the planner, the simulator and the tests. Torch-free.

`uses` lists the collectives of a step, from the slices that the layers are built with; `Use.sent` is what one costs.
That depends on what carries it (`Transport`):

    shared   shared memory between CPUs of a machine (csrc/cpu/collective.h): a rank writes what it has once for all
             others. Of a sum it writes the others' parts in fp32, and the result of its own part
    gloo     torch.distributed between hosts: a ring. A sum gathers all rows and adds them in order
    ring     NCCL between GPUs: an all-reduce is a reduce-scatter and an all-gather in the model's dtype (rings:
             Patarasuk and Yuan 2009)

Both layouts of tensor parallelism are slices of a `Shard`: the tp axis has a sum per block, the ep axis gathers the
block's inputs and outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from quire.modelspec import DTYPE_BYTES, LayerSpec, MlpSpec, ModelSpec
from quire.parallel.shard import Shard
from quire.parallel.stripe import DIVIDE_FROM
from quire.parallel.topology import Axis
from quire.recurrent_weights import prefix_of

Transport = Literal["shared", "gloo", "ring"]
Kind = Literal["all_reduce", "all_gather", "all_to_all", "gather_parts", "dispatch", "send"]
Rows = Literal["tokens", "own", "sampled"]
SUM_BLOCK = 256  # elements; shared memory is summed in whole blocks


def sent(
    kind: Kind, num_elements: float, ranks: int, taken: int, after: int, transport: Transport = "shared", index: int = 0
) -> float:  # fmt: skip
    """Return the bytes that rank ``index`` of ``ranks`` sends, where each has ``num_elements`` of its own.

    ``taken``, ``after``: bytes of an element before and after; they differ only for sums.
    """
    if transport == "shared":
        if kind == "all_reduce" and after <= taken and num_elements >= ranks * SUM_BLOCK:
            blocks = -(-num_elements // SUM_BLOCK)
            start, stop = (min(num_elements, blocks * at // ranks * SUM_BLOCK) for at in (index, index + 1))
            return num_elements * taken - (stop - start) * (taken - after)
        return num_elements * taken
    if kind in ("dispatch", "send"):
        return num_elements * taken
    if kind == "all_to_all":
        return num_elements * taken * (ranks - 1) / ranks
    if kind == "all_reduce" and transport == "ring":
        return 2 * num_elements * after * (ranks - 1) / ranks
    return num_elements * taken * (ranks - 1)


@dataclass(frozen=True, slots=True)
class Use:
    """``count`` equal collectives in a step.

    ``rows``: how many rows they have. "tokens": one per token of the step; "sampled": those that give logits; "own":
    one per token, or where ranks of the cp axis divide the step one per token of this rank.
    """

    axis: Axis
    kind: Kind
    count: int
    size: float  # elements of a row, on this rank
    ranks: int
    taken: int  # bytes of an element
    given: int  # the same of the result
    rows: Rows
    # This rank's index on the axis: sums in shared memory have parts of whole blocks.
    index: int = 0
    cp: int = 1
    # Only in steps that the cp axis divides (True) or does not divide (False); None: in every step.
    is_divided: bool | None = None

    def num_rows(self, num_tokens: int, num_logits: int) -> int:
        """Return the rows in a step; 0: the step has no such collective."""
        divided = self.cp > 1 and num_tokens >= DIVIDE_FROM * self.cp
        if self.is_divided is not None and divided != self.is_divided:
            return 0
        if self.rows == "sampled":
            return num_logits
        return -(-num_tokens // self.cp) if self.rows == "own" and divided else num_tokens

    def sent(self, num_tokens: int, num_logits: int, transport: Transport = "shared") -> float:
        """Return the bytes that the rank sends in one of them; in step of ``num_tokens``."""
        rows = self.num_rows(num_tokens, num_logits)
        return sent(self.kind, rows * self.size, self.ranks, self.taken, self.given, transport, self.index)


def uses(shard: Shard, dtype: str, *, has_adapters: bool = False) -> tuple[Use, ...]:
    """Return the collectives of a step of the rank that has ``shard``, with activations of ``dtype``.

    ``has_adapters``: the engine has slots for adapters, beside which partial sums have the type of the activations.
    """
    traffic = _Uses(shard, DTYPE_BYTES[dtype], has_adapters)
    if shard.is_first:
        traffic.add_sum(traffic.item, "own")
    for number, layer in enumerate(shard.spec.layers):
        # After its attention the model's last layer goes on with the sampled rows alone.
        is_last = shard.is_last and number == len(shard.layers) - 1
        if (a := layer.attn) is not None:
            traffic.add_stripes(layer)
            traffic.add_block(f"layers.{number}.attn.o.weight", a.num_heads * a.v_head_dim, "own")
        if (r := layer.recurrent) is not None:
            traffic.add_block(f"layers.{number}.{prefix_of(r)}o.weight", r.v_width, "own")
        traffic.add_mlp(f"layers.{number}.", layer.mlp, "sampled" if is_last else "own")
    hidden = shard.whole.hidden_size
    residual = traffic.item if shard.spec.layers[-1].norms == "post" else DTYPE_BYTES["float32"]
    for taken in (traffic.item, residual):
        traffic.add("cp", "all_gather", hidden, "own", taken=taken, is_divided=True)
    if shard.is_last:
        traffic.add(traffic.layers_axis, "all_gather", len(shard.vocab), "sampled", taken=4)
    else:
        traffic.add("pp", "send", hidden + hidden * DTYPE_BYTES["float32"] // traffic.item, "tokens")
    return tuple(Use(count=count, **dict(key)) for key, count in traffic.counts.items())  # type: ignore[arg-type]


class _Uses:
    """Counts equal collectives. An axis of one rank has none."""

    def __init__(self, shard: Shard, item: int, has_adapters: bool) -> None:
        self.item = item
        self.counts: dict[tuple[tuple[str, object], ...], int] = {}
        self.layers_axis: Axis = "ep" if shard.topology.ep > 1 else "tp"
        self._shard, self._partial = shard, item if has_adapters else 4
        self._hidden = shard.whole.hidden_size

    def add(
        self, axis: Axis, kind: Kind, size: float, rows: Rows, *, taken: int | None = None,
        is_divided: bool | None = None,
    ) -> None:  # fmt: skip
        topology = self._shard.topology
        ranks, taken = getattr(topology, axis), taken or self.item
        if ranks > 1:
            is_sum = kind == "all_reduce"
            after = self.item if is_sum else taken
            key = {
                "axis": axis, "kind": kind, "size": size, "ranks": ranks, "taken": taken, "given": after, "rows": rows,
                "index": getattr(self._shard.at, axis) * is_sum, "cp": topology.cp, "is_divided": is_divided,
            }  # fmt: skip
            self.counts[tuple(key.items())] = self.counts.get(tuple(key.items()), 0) + 1

    def add_sum(self, taken: int, rows: Rows) -> None:
        self.add(self.layers_axis, "all_reduce", self._hidden, rows, taken=taken)

    def add_block(self, name: str, num_inputs: int, rows: Rows) -> None:
        """Add what the last matrix of a block needs, of whose inputs this rank has ``num_inputs``."""
        cut = self._shard.cuts.get(name)
        if cut is not None and cut.columns is not None:
            self.add_sum(self._partial, rows)
        elif cut is not None and cut.rows is not None:
            self.add("ep", "all_gather", num_inputs, rows)
            self.add("ep", "all_gather", len(cut.rows), rows)

    def add_mlp(self, prefix: str, mlp: MlpSpec, rows: Rows) -> None:
        self.add_block(prefix + "mlp.down.weight", mlp.intermediate_size, rows)
        if (moe := mlp.moe) is None:
            return
        if self._shard.topology.ep > 1:  # equally many (token, expert) pairs on each rank
            self.add("ep", "gather_parts", moe.top_k * self._hidden / self._shard.topology.ep, rows)
        else:
            self.add_sum(self.item, rows)
        self.add_block(prefix + "moe.shared.down.weight", moe.shared_intermediate_size, rows)

    def add_stripes(self, layer: LayerSpec) -> None:
        """Add what ranks with other positions exchange around attention (`layers.context`)."""
        a, cp = layer.attention, self._shard.topology.cp
        part = a.num_heads * ((a.kv_lora_rank if a.is_mla else a.v_head_dim) + 2)
        self.add("cp", "all_gather", part, "tokens", taken=4, is_divided=False)
        if a.is_mla:
            key = a.kv_elements_per_token
            self.add("cp", "all_gather", key, "own", is_divided=True)
            self.add("cp", "all_gather", a.num_heads * key, "own", is_divided=True)
        else:
            qkv = a.num_heads * a.head_dim + a.num_kv_heads * (a.head_dim + a.v_head_dim)
            self.add("cp", "all_gather", qkv, "own", is_divided=True)
        self.add("cp", "all_to_all", cp * part, "own", taken=4, is_divided=True)


def dispatches(spec: ModelSpec, ranks: int, dtype: str) -> tuple[Use, ...]:
    """Return what ``ranks`` with their own attention exchange: each token to the ranks of its experts, and back.

    A token goes to a rank once, however many of its experts are there.
    """
    item, counts = DTYPE_BYTES[dtype], Counter(layer.mlp.moe.top_k for layer in spec.layers if layer.mlp.moe)
    return tuple(
        Use(
            "ep", "dispatch", 2 * count, min(top_k, ranks - 1) * spec.hidden_size, ranks, item, item, "tokens"
        )
        for top_k, count in counts.items()
    )


def step_bytes(
    uses: Iterable[Use], num_tokens: int, num_logits: int, transport: Transport = "shared"
) -> float:
    """Return the bytes that a rank sends in a step."""
    return sum(use.count * use.sent(num_tokens, num_logits, transport) for use in uses)
