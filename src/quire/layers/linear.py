"""A linear, possibly of several matrices of the checkpoint (q, k, v; gate, up); token embedding and output matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.collective import Group, gathered_parts
from quire.kernels.linear import PackedLinear, QuantizedRows, linear, pack_empty, read_rows, write_bias
from quire.kernels.lora import AdapterRows, LoraStack, add_lora, stack_empty
from quire.kernels.pointwise import local_ids, scale_rows, take_rows
from quire.kernels.workspace import empty
from quire.layers.end_slots import EndSlots
from quire.layers.weights import WHOLE, Build, MatrixLoader, Stage, WeightLoader, copy_into
from quire.weight_format import PLAIN, WeightFormat


@dataclass(frozen=True, slots=True)
class Gathered:
    """Ranks that have parts of the inputs of a matrix, and of its outputs: where the columns of each begin."""

    group: Group
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Linear:
    """``parts``: name → output features, stacked in that order. Weights lie in the layout of the kernel.

    A part "{part}.weight" may be quantized (`Build.formats`). Neighbours of one format are one matrix; where formats
    differ (GGUF's Q4_K_M holds v in another format than q and k), there are several, each for a range of columns.
    """

    def __init__(
        self, parts: Mapping[str, int], in_features: int, build: Build, *, bias: bool = False,
        reduce: Group | None = None, gather: Gathered | None = None,
    ) -> None:  # fmt: skip
        """``reduce``: ranks that have the other inputs of the matrix; their partial sums are added.

        ``gather``: ranks that have parts of the input, and the other outputs of the matrix; all get all outputs.
        """
        self._reduce, self._gather = reduce, gather
        self.parts = dict(parts)
        self._in_features = in_features
        self._dtype = build.dtype
        self._lora_backend = build.backend("lora")
        self.lora: LoraStack | None = None
        self.segments: list[PackedLinear] = []
        self._where: dict[str, tuple[PackedLinear, int]] = {}  # part → its matrix and first row there
        for format, names in groupby(parts, lambda name: build.held(f"{name}.weight")):
            names_of_format = list(names)
            backend = build.matrix_backend(format)
            rows = sum(parts[name] for name in names_of_format)
            packed = pack_empty(rows, in_features, build.dtype, bias=bias, backend=backend, format=format)
            start = 0
            for name in names_of_format:
                self._where[name] = (packed, start)
                start += parts[name]
            self.segments.append(packed)

    @property
    def packed(self) -> PackedLinear:
        """The matrix of a linear with one format."""
        assert len(self.segments) == 1, [segment.format for segment in self.segments]
        return self.segments[0]

    @property
    def gathers(self) -> bool:
        """Whether the input comes in parts from several ranks."""
        return self._gather is not None

    @cached_property
    def reads(self) -> WeightFormat:
        """The format whose `QuantizedRows` it takes; PLAIN where it takes plain rows, as adapters need."""
        reads_rows = len(self.segments) == 1 and self.segments[0].reads_quantized and self.lora is None
        format = self.segments[0].format if reads_rows else PLAIN
        # Ops that write fp8 rows give them one scale per row, not one per group.
        return PLAIN if format.kind == "fp8" and format.group else format

    def add_slots(self, num_slots: int, max_rank: int) -> None:
        """Allocate slots for adapters beside the weights. To be called before `reads` is read."""
        self.lora = stack_empty(
            tuple(self.parts.values()), self._in_features, num_slots, max_rank, self._dtype, backend=self._lora_backend
        )  # fmt: skip

    def rows_of(self, part: str, ids: Tensor) -> Tensor:
        """Return rows of the matrix of ``part``, expanded: fp32 ``[len(ids), in_features]``, on the host."""
        packed, start = self._where[part]
        return read_rows(packed, (ids + start).to(packed.data.device)).float().cpu()

    def bias_of(self, part: str) -> Tensor | None:
        """Return the bias of ``part``: fp32 ``[features]``, on the host."""
        packed, start = self._where[part]
        return None if packed.bias is None else packed.bias[start : start + self.parts[part]].float().cpu()

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Return ``{part}.weight [features, in_features]`` and, with biases, ``{part}.bias [features]``."""
        loaders: dict[str, WeightLoader] = {}
        for name, (packed, start) in self._where.items():
            loaders[f"{name}.weight"] = MatrixLoader([packed], start)
            if packed.bias is not None:
                loaders[f"{name}.bias"] = partial(write_bias, packed, start)
        return loaders

    def __call__(
        self, x: Tensor | QuantizedRows, adapters: AdapterRows | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:  # fmt: skip
        """``[num_tokens, in_features]`` → ``[num_tokens, sum of the parts]``, in x's dtype by default.

        ``adapters``: which rows have which adapter, for a linear with slots.
        """
        if self._gather is not None:
            assert isinstance(x, Tensor)
            x = self._gather.group.all_gather(x, self._gather.inputs)
        if self._reduce is not None and self.lora is None:
            return self._reduce.all_reduce(self._base(x, torch.float32), out_dtype or x.dtype)
        y = self._base(x, out_dtype)
        if self.lora is not None and adapters is not None:
            assert isinstance(x, Tensor)
            add_lora(x, y, self.lora, adapters)
        if self._gather is not None:
            return self._gather.group.all_gather(y, self._gather.outputs)
        return y if self._reduce is None else self._reduce.all_reduce(y, y.dtype)

    def _base(self, x: Tensor | QuantizedRows, out_dtype: torch.dtype | None) -> Tensor:
        if len(self.segments) == 1:
            return linear(x, self.segments[0], out_dtype=out_dtype)
        num_tokens = x.shape[0] if isinstance(x, Tensor) else x.num_tokens
        device = x.device if isinstance(x, Tensor) else x.q.device
        y = empty(num_tokens, sum(self.parts.values()), dtype=out_dtype or x.dtype, device=device)
        start = 0
        # Into their columns: `cat` is not a native call and cannot be recorded (`kernels.tape`).
        for packed in self.segments:
            stop = start + packed.out_features
            linear(x, packed, out_dtype=out_dtype, out=y[:, start:stop])
            start = stop
        return y


class LoraTarget(NamedTuple):
    """One matrix that an adapter may change: ``part`` of ``linear``, whose slots are ``stack``."""

    linear: Linear
    stack: LoraStack
    part: str

    @property
    def part_index(self) -> int:
        """Which part of the stack it is."""
        return list(self.linear.parts).index(self.part)


def lora_targets(linears: Iterable[tuple[str, Linear]]) -> dict[str, LoraTarget]:
    """Return prefix + part → what an adapter changes there, of the linears that have slots."""
    return {
        prefix + part: LoraTarget(linear, linear.lora, part)
        for prefix, linear in linears
        if linear.lora is not None
        for part in linear.parts
    }


def completing(
    name: str, out_features: int, in_features: int, build: Build, *, bias: bool = False, whole: bool = False
) -> Linear:
    """Return the last matrix of a block, whose inputs may be cut over ranks; the block's output is on all of them.

    ``in_features``: of this rank. ``whole``: they are not cut over the tp axis.
    """
    rows, columns = build.shapes.get(f"{name}.weight", (out_features, in_features))
    if rows < out_features:
        group = build.ep_group
        assert group is not None
        gather = Gathered(group, gathered_parts(group, in_features), gathered_parts(group, rows))
        assert (gather.inputs[-1], gather.outputs[-1]) == (columns, out_features), (name, gather)
        return Linear({name: rows}, columns, build, bias=bias, gather=gather)
    return Linear(
        {name: out_features}, in_features, build, bias=bias, reduce=None if whole else build.tp_group
    )


class Embedding:
    """Input table and output matrix of a model.

    Tied embeddings are one matrix in the layout of the linear kernel; a quantized table is in that layout too.

    With tensor parallelism a rank has a part of the rows, and a row of zeros after them for the ids of other ranks, so
    that the sum over the ranks is the embedding.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        build: Build,
        *,
        tied: bool,
        scale: float,
        stage: Stage = WHOLE,
        adapted: bool = False,
    ) -> None:
        """``stage``: the first one has the table, the last one the output matrix. ``adapted``: there are `slots`."""
        self._tp = build.tp
        self.slots = EndSlots(build) if adapted else None
        if build.tp is not None:
            vocab_size = build.tp.shard.max_vocab + 1
        self._local_ids = build.of(local_ids)
        self._take_rows, self._scale_rows = build.of(take_rows), build.of(scale_rows)
        self._scale = torch.tensor(scale, dtype=build.dtype).item()  # rounded first, as in training
        format = build.held("embed.weight")
        head_format = format if tied else build.held("lm_head.weight")
        self._head: Linear | None = None
        if tied or stage.is_last:
            self._head = Linear(
                {"head": vocab_size}, hidden_size, replace(build, formats={"head.weight": head_format})
            )
        self._table: Tensor | None = None
        # Holds the rows where there is no table.
        self._packed: PackedLinear | None = self._head.packed if tied and self._head is not None else None
        if not tied and stage.is_first and format.quantized:
            self._packed = pack_empty(
                vocab_size, hidden_size, build.dtype, bias=False, backend=build.matrix_backend(format), format=format
            )  # fmt: skip
        elif not tied and stage.is_first:
            self._table = torch.zeros(vocab_size, hidden_size, dtype=build.dtype)
        self._tied = tied

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders: dict[str, WeightLoader] = {}
        if not self._tied and self._packed is not None:
            loaders["embed.weight"] = MatrixLoader([self._packed], 0)
        if self._table is not None:
            table = self._table if self._tp is None else self._table[: len(self._tp.shard.vocab)]
            loaders["embed.weight"] = copy_into(table)
        if self._head is not None:
            name = "embed.weight" if self._tied else "lm_head.weight"
            loaders[name] = self._head.weight_loaders()["head.weight"]
        return loaders

    def __call__(self, input_ids: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """``input_ids [num_tokens]`` → ``[num_tokens, hidden_size]``, scaled (Gemma, Granite)."""
        rows = self.rows_of(input_ids)
        if self.slots is not None and adapters is not None:
            self.slots.change_rows(input_ids, rows, adapters)
        return rows if self._scale == 1.0 else self._scale_rows(rows, self._scale)

    def rows_of(self, input_ids: Tensor) -> Tensor:
        """As a call, before adapters and the scale."""
        if self._tp is not None:
            input_ids = self._local_ids(input_ids, self._tp.shard.vocab, self._tp.shard.max_vocab)
        if self._packed is not None:
            rows = read_rows(self._packed, input_ids)
        else:
            assert self._table is not None
            rows = self._take_rows(self._table, input_ids)
        return rows if self._tp is None else self._tp.group.all_reduce(rows, rows.dtype)

    def head_rows_of(self, ids: Tensor) -> Tensor:
        """Return rows of the output matrix, of those that this rank has."""
        assert self._head is not None, "only the last stage gives logits"
        return self._head.rows_of("head", ids)

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """``hidden [num_logits, hidden_size]`` → fp32 ``[num_logits, vocab_size]``."""
        assert self._head is not None, "only the last stage gives logits"
        logits = self._head(hidden, out_dtype=torch.float32)
        own = logits if self._tp is None else logits[:, : len(self._tp.shard.vocab)]
        if self.slots is not None and adapters is not None:
            self.slots.change_logits(hidden, own, adapters)
        return logits if self._tp is None else self._tp.group.all_gather(own, self._tp.shard.vocab_begins)
