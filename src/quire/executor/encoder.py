"""`EncoderExecutor`: an encoder in this process. Each step computes whole sequences, and keeps nothing of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite

import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.executor.base import failed
from quire.kernels.encoder import whole_sequences
from quire.kernels.registry import choose
from quire.kernels.threads import choose_threads
from quire.layers.pooled_rows import pooled
from quire.layers.weights import Build
from quire.models.dense import DenseLayers
from quire.models.encoder import Encoder
from quire.models.packed_cache import CheckpointWeights
from quire.quant.stored import Weight
from quire.runner.memory import keep_freed_memory, torch_dtype
from quire.step import NewSeq, SeqResult, StepPlan, StepResult


class EncoderExecutor:
    """Computes a plan when its result is collected; ``weights`` replace the checkpoint's, for tests."""

    max_in_flight = 1
    chains_steps = True

    def __init__(self, config: EngineConfig, *, weights: Iterable[tuple[str, Weight]] | None = None) -> None:
        choose_threads(config.runner.num_threads, torch_is_heavy=config.runner.backend == "reference")
        keep_freed_memory()
        dtype = torch_dtype(config.model.dtype)
        build = Build(dtype, choose(config.runner), config.model.spec.norm_eps, formats=config.model.formats)
        self.model = Encoder(config.model.spec, build, config.model.max_model_len)
        self._dense = DenseLayers(config.model)
        self.model.load(CheckpointWeights(config.model, dtype, config.runner) if weights is None else weights)
        self._seqs: dict[int, NewSeq] = {}
        self._pending: StepPlan | None = None

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; the one before must have been collected."""
        assert self._pending is None, "one step at a time: collect the last one first"
        self._pending = plan

    def collect(self) -> StepResult:
        """Compute the plan that was submitted and return its result."""
        plan, self._pending = self._pending, None
        assert plan is not None, "nothing was submitted"
        try:
            return self._execute(plan)
        except Exception as error:
            return failed(plan, error)

    def close(self) -> None:
        """Give the weights back. Nothing is submitted any more."""
        self._pending = None
        del self.model

    def _execute(self, plan: StepPlan) -> StepResult:
        for seq_id in plan.gone:
            self._seqs.pop(seq_id, None)
        self._seqs.update((new.seq_id, new) for new in plan.new_seqs)
        named = [(seq_plan, self._seqs.get(seq_plan.seq_id)) for seq_plan in plan.seqs]
        texts = [
            seq
            for seq_plan, seq in named
            if seq is not None
            and seq.pooling is not None
            and (seq_plan.num_computed_tokens, seq_plan.num_scheduled_tokens)
            == (0, len(seq.prompt_token_ids))
        ]
        vectors = dict(zip((seq.seq_id for seq in texts), self._vectors(texts), strict=True))
        return StepResult(
            plan.step,
            tuple(
                _result(seq_plan.seq_id, seq_plan.epoch, vectors.get(seq_plan.seq_id))
                for seq_plan in plan.seqs
            ),
        )

    def _vectors(self, seqs: Sequence[NewSeq]) -> list[tuple[float, ...]]:
        """Return what each of ``seqs`` wants of its text."""
        if not seqs:
            return []
        lengths = [len(seq.prompt_token_ids) for seq in seqs]
        sequences = whole_sequences(lengths)
        ids = torch.tensor([token_id for seq in seqs for token_id in seq.prompt_token_ids])
        positions = torch.cat([torch.arange(length) for length in lengths])
        # Which text of a pair a row belongs to.
        second_from = [
            length if seq.pooling is None else seq.pooling.second_from or length
            for seq, length in zip(seqs, lengths, strict=True)
        ]
        types = (
            positions >= torch.repeat_interleave(torch.tensor(second_from), torch.tensor(lengths))
        ).long()
        with torch.inference_mode():
            rows = self.model(ids, positions, types, sequences)
            return [
                self._vector(rows[start : start + length], seq)
                for seq, start, length in zip(seqs, sequences.starts, lengths, strict=False)
            ]

    def _vector(self, rows: Tensor, seq: NewSeq) -> tuple[float, ...]:
        assert seq.pooling is not None
        if seq.pooling.kind in ("classify", "logits"):
            return tuple(self.model.scores(rows, raw=seq.pooling.kind == "logits"))
        if seq.pooling.kind == "tokens":
            return tuple(rows.float().flatten().tolist())
        if seq.pooling.kind == "sparse":
            return tuple(value for part in self.model.sparse(rows) for value in part.tolist())
        return tuple(self._dense(pooled(rows, seq.pooling.kind)).tolist())


def _result(seq_id: int, epoch: int, vector: tuple[float, ...] | None) -> SeqResult:
    """Return the result of one sequence; None: it could not be computed."""
    if vector is None:
        return SeqResult(seq_id, epoch, (), error="an encoder computes whole texts, and writes none")
    if not all(map(isfinite, vector)):
        return SeqResult(seq_id, epoch, (), error="its hidden states are not finite")
    return SeqResult(seq_id, epoch, (), pooled=vector)
