"""`SpanRows`: puts the rows of an encoder where the tokens of spans would have their embeddings.

A span is encoded by itself, when a chunk first has one of its tokens, so its rows are the same bits in every step and
after every preemption. They are kept by content, since a long span is computed in several chunks and a conversation
shows its images again in every turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import StepError
from quire.images.limits import LIMITS
from quire.kernels import registry
from quire.models.decoder import Decoder
from quire.models.vision.loading import Encode, load_encoder
from quire.runner.input_batch import PreparedStep
from quire.runner.memory import torch_dtype
from quire.runner.sequences import WorkerSeq
from quire.spans import Span
from quire.step import SeqPlan


class SpanRows:
    """The encoder of one worker, and what it made of the spans it saw last."""

    def __init__(self, config: EngineConfig, decoder: Decoder, max_bytes: int = LIMITS.encoded_bytes) -> None:
        model = config.model
        self._decoder, self._max_bytes = decoder, max_bytes
        self._encode: Encode = load_encoder(model, torch_dtype(model.dtype), registry.choose(config.runner))
        self._kept: OrderedDict[tuple[bytes, tuple[int, ...]], Tensor] = OrderedDict()
        self.num_bytes = 0  # kept
        self.num_encoded = 0  # since the start

    @torch.inference_mode()
    def place(self, step: PreparedStep, plans: Sequence[SeqPlan], seqs: Sequence[WorkerSeq]) -> PreparedStep:
        """Return ``step`` with the rows of the spans that it has tokens of."""
        embeddings: Tensor | None = None
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
                rows = self._rows_of(span)
                embeddings[at + first : at + stop] = rows[first - span.start : stop - span.start]
        # No sum is open in front of the first layer: its ``delta`` is None.
        return step if embeddings is None else replace(step, entering=(cast("Tensor", None), embeddings))

    def _rows_of(self, span: Span) -> Tensor:
        """Return what the encoder makes of ``span``: ``[length, hidden_size]``."""
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
