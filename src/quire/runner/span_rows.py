"""`SpanRows`: puts the rows of an encoder where the tokens of spans would have their embeddings.

A span is encoded by itself, when a chunk first has one of its tokens, so its rows are the same bits in every step and
after every preemption. They are kept by content, since a long span is computed in several chunks and a conversation
shows its images again in every turn.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError, StepError
from quire.images.limits import LIMITS
from quire.kernels import registry
from quire.layers.span_attention import WholeSpan
from quire.models.both_ways import BothWaysEnds
from quire.models.decoder import Decoder
from quire.models.deepstack import SeeingEnds
from quire.models.vision.loading import Encode, load_encoder
from quire.runner.input_batch import PreparedStep
from quire.runner.memory import torch_dtype
from quire.runner.sequences import WorkerSeq
from quire.spans import Span
from quire.step import SeqPlan

if TYPE_CHECKING:  # loaded with a model whose positions have three axes
    from quire.runner.axes import AxisAngles

_log = logging.getLogger(__name__)


class SpanRows:
    """The encoder of one worker, and what it made of the spans it saw last."""

    def __init__(self, config: EngineConfig, decoder: Decoder, max_bytes: int = LIMITS.encoded_bytes) -> None:
        model = config.model
        self._decoder, self._max_bytes = decoder, max_bytes
        self._encode: Encode = load_encoder(model, torch_dtype(model.dtype), registry.choose(config.runner))
        vision = model.spec.vision
        assert vision is not None
        self._width = vision.text_hidden_size
        self._angles: AxisAngles | None = None
        if vision.axes:
            if config.speculate is not None and config.speculate.num_branch_blocks:
                raise ConfigError(
                    "spec_tree: trees of drafts are not supported for a model whose positions have three axes.",
                    param="spec_tree",
                )
            self._angles = import_module("quire.runner.axes").AxisAngles(
                vision, decoder.ropes, config.scheduler.max_num_batched_tokens
            )
        self._kept: OrderedDict[tuple[bytes, tuple[int, ...]], Tensor] = OrderedDict()
        self.num_bytes = 0  # kept
        self.num_encoded = 0  # since the start

    @torch.inference_mode()
    def encode(
        self, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq]
    ) -> tuple[list[SeqPlan], list[WorkerSeq]]:
        """Encode the spans that a step has tokens of; return what is left of it: a sequence that fails is refused."""
        left: list[tuple[SeqPlan, WorkerSeq]] = []
        for plan, seq in zip(plans, seqs, strict=True):
            begin, end = plan.num_computed_tokens, plan.num_computed_tokens + plan.num_scheduled_tokens
            try:
                for span in seq.spans:
                    if max(begin, span.start) < min(end, span.end):
                        self._rows_of(span)
            except Exception as error:
                seq.refusal = f"an image of its prompt cannot be encoded: {type(error).__name__}: {error}"
                _log.error("sequence %d: %s", seq.seq_id, seq.refusal, exc_info=True)
            else:
                left.append((plan, seq))
        return [plan for plan, _ in left], [seq for _, seq in left]

    @torch.inference_mode()
    def place(self, step: PreparedStep, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq]) -> PreparedStep:
        """Return ``step`` with the rows of the spans that it has tokens of."""
        if self._angles is not None:
            self._decoder.cover(step.num_positions)
            self._angles.place(step, plans, seqs)
        embeddings: Tensor | None = None
        added: list[tuple[Tensor, Tensor]] = []
        whole: list[WholeSpan] = []
        for index, (plan, seq) in enumerate(zip(plans, seqs, strict=True)):
            begin, end = plan.num_computed_tokens, plan.num_computed_tokens + plan.num_scheduled_tokens
            for span in seq.spans:
                first, stop = max(begin, span.start), min(end, span.end)
                if first >= stop:
                    continue
                if embeddings is None:
                    batch = step.batch
                    embeddings = self._decoder.ends.embed(batch.input_ids, batch.end_tokens).clone()
                at = int(step.buffers.cu_seqlens_q[index]) - begin
                rows = self._rows_of(span)[first - span.start : stop - span.start]
                embeddings[at + first : at + stop] = rows[:, : self._width]
                added.append((torch.arange(at + first, at + stop), rows[:, self._width :]))
                if span.whole:
                    assert stop == span.end, (plan, span.start, span.end)
                    whole.append(WholeSpan(index, at + first, stop - first, stop))
        match self._decoder.ends:
            case SeeingEnds() as ends:
                ends.add(added)
            case BothWaysEnds() as ends:
                ends.both_ways.spans = whole
        # No sum is open in front of the first layer: its ``delta`` is None.
        return step if embeddings is None else replace(step, entering=(cast("Tensor", None), embeddings))

    def _rows_of(self, span: Span) -> Tensor:
        """Return what the encoder makes of ``span``: ``[length, hidden_size]``, or several of those side by side."""
        name = span.content, span.grid
        rows = self._kept.get(name)
        if rows is not None:
            self._kept.move_to_end(name)
            return rows
        rows = self._encode(span)
        if rows.shape[0] != span.length:
            raise StepError(f"An image has {span.length} tokens, and its encoder gave {rows.shape[0]} rows.")
        self.num_encoded += 1
        self._kept[name] = rows
        self.num_bytes += rows.nbytes
        while self.num_bytes > self._max_bytes and len(self._kept) > 1:
            self.num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return rows
