"""Forward and sample: the tensors of a step → one `SeqSample` for every sequence that samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from quire.config import EngineConfig
from quire.kernels import registry
from quire.kernels.tape import NotRecordable, StepTape
from quire.layers.step_batch import StepBatch
from quire.models.decoder import Decoder
from quire.quant.stored import Weight
from quire.runner.grammars import Grammars
from quire.runner.input_batch import PreparedStep
from quire.runner.memory import KvCache, torch_dtype
from quire.runner.step_buffers import StepBuffers
from quire.sampling.sampler import Sampler, SeqSample

_log = logging.getLogger(__name__)
ObserveLogits = Callable[[int, int, torch.Tensor], None]


class ModelRunner:
    """Owns the model, the KV cache and the sampler of one worker.

    ``observe_logits(seq_id, position, row)`` sees every row of raw logits that samples (tests set it); the row's memory
    is the next step's.
    """

    def __init__(self, config: EngineConfig, weights: Iterable[tuple[str, Weight]]) -> None:
        model = config.model
        kernels = registry.choose(config.runner.cpu_isa)
        self.decoder = Decoder(
            model.spec,
            config.kv_layout,
            model.max_model_len,
            torch_dtype(model.dtype),
            kernels,
            formats=model.formats,
        )
        with torch.inference_mode():
            self.decoder.load(weights)
        self.kv = KvCache(
            model.spec,
            config.kv_layout,
            config.cache.num_blocks,
            config.cache.block_size,
            model.kv_dtype,
            kernels,
        )
        self.sampler = Sampler(model.spec.vocab_size, kernels)
        self.grammars = Grammars(model.tokenizer, model.spec.vocab_size, config.runner.num_threads)
        self.observe_logits: ObserveLogits | None = None
        self.tape: StepTape | None = None
        self._taped: StepBuffers | None = None  # whose steps `tape` computes

    @torch.inference_mode()
    def record(self, buffers: StepBuffers) -> None:
        """Record the step of ``buffers``, so that their steps are replayed, if the model is native throughout."""
        whole = buffers.whole
        try:
            self.tape = StepTape(lambda: self._logits_of(whole), buffers.max_tokens, buffers.max_seqs)
        except NotRecordable as reason:
            _log.info("steps run call by call: %s", reason)
        else:
            self._taped = buffers
            _log.info("a step is %d recorded calls", len(self.tape))

    @torch.inference_mode()
    def run(self, step: PreparedStep, seq_ids: Sequence[int]) -> list[SeqSample]:
        """Compute the step; ``seq_ids`` own its rows of logits, in that order."""
        self.decoder.cover(step.num_positions)
        if self.tape is not None and step.buffers is self._taped:
            step.buffers.set_num_seqs(step.num_seqs)
            logits = self.tape.run(step.num_tokens, len(seq_ids))
        else:
            logits = self._logits_of(step.batch)
        if not seq_ids:
            return []
        if self.observe_logits is not None:
            rows = step.buffers.logits_indices[: len(seq_ids)]
            positions = step.buffers.positions[rows].tolist()
            for seq_id, position, row in zip(seq_ids, positions, logits, strict=True):
                self.observe_logits(seq_id, position, row)
        failed = self.grammars.apply(logits, seq_ids)
        samples = self.sampler.sample(logits, seq_ids)
        if failed:
            errors = {i: failed[seq_id] for i, seq_id in enumerate(seq_ids) if seq_id in failed}
            samples = [SeqSample(-1, error=errors[i]) if i in errors else s for i, s in enumerate(samples)]
        self.grammars.follow(seq_ids, samples)
        return samples

    def _logits_of(self, batch: StepBatch) -> torch.Tensor:
        """``[num_logits, vocab_size]`` fp32."""
        return self.decoder.logits(self.decoder.forward(batch, self.kv.views))
