"""Forward and sample: the tensors of a step → one `SeqSample` for every sequence that samples."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from quire.config import EngineConfig
from quire.kernels import registry
from quire.kernels.sampling import token_logprobs
from quire.kernels.tape import NotRecordable, StepTape
from quire.layers.step_batch import StepBatch
from quire.models.decoder import Decoder
from quire.quant.stored import Weight
from quire.request import TokenLogprobs
from quire.runner.grammars import Grammars
from quire.runner.input_batch import PreparedStep
from quire.runner.memory import KvCache, torch_dtype
from quire.runner.runner import ObserveLogits, Wait
from quire.runner.step_buffers import StepBuffers
from quire.sampling.sampler import Sampler, SeqSample

_log = logging.getLogger(__name__)


class ModelRunner:
    """Owns the model, the KV cache and the sampler of one worker.

    ``observe_logits(seq_id, position, row)`` sees every row of raw logits that samples (tests set it); the row's memory
    is the next step's.
    """

    def __init__(self, config: EngineConfig, weights: Iterable[tuple[str, Weight]]) -> None:
        model = config.model
        kernels = registry.choose(config.runner)
        self.decoder = Decoder(
            model.spec,
            config.kv_layout,
            model.max_model_len,
            torch_dtype(model.dtype),
            kernels,
            formats=model.formats,
            lora=config.lora,
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
        self._logprobs_backend = kernels.backend("token_logprobs")
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

    def launch(self, step: PreparedStep, seq_ids: Sequence[int]) -> Wait:
        """As `Runner.launch`: here the step is computed at once."""
        samples = self.run(step, seq_ids)
        return lambda: samples

    def idle(self) -> None:
        """As `Runner.idle`: nothing was put off."""

    def free_memory(self) -> None:
        """As `Runner.free_memory`: nothing is kept."""

    @torch.inference_mode()
    def run(self, step: PreparedStep, seq_ids: Sequence[int]) -> list[SeqSample]:
        """Compute the step; ``seq_ids`` own its rows of logits, in that order."""
        self.decoder.cover(step.num_positions)
        if self.tape is not None and step.buffers is self._taped:
            step.buffers.set_num_seqs(step.num_seqs)
            logits = self.tape.run(step.num_tokens, len(seq_ids))
        else:
            logits = self._logits_of(step.batch)
        return self._sample(step, seq_ids, logits)

    @torch.inference_mode()
    def run_with_rows(
        self, step: PreparedStep, seq_ids: Sequence[int], rows: npt.NDArray[np.int64]
    ) -> tuple[list[SeqSample], torch.Tensor]:
        """As `run`; also return the hidden states of ``rows`` of the step, after the last norm: ``[rows, hidden]``.

        Call by call, since a recorded step has no more than a row a sequence after its last layer.
        """
        self.decoder.cover(step.num_positions)
        batch = step.batch
        indices = torch.cat((batch.logits_indices, torch.from_numpy(rows)))
        adapters = batch.adapters
        if adapters is not None:
            adapters = replace(adapters, logits=adapters.tokens.take(indices.numpy()))
        batch = replace(batch, logits_indices=indices, adapters=adapters)
        hidden = self.decoder.forward(batch, self.kv.views)
        drawn = hidden[: len(seq_ids)]
        samples = self._sample(step, seq_ids, self.decoder.logits(drawn)) if seq_ids else []
        return samples, hidden[len(seq_ids) :]

    @torch.inference_mode()
    def logits_of_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [rows, hidden_size]`` → fp32 ``[rows, vocab_size]``."""
        return self.decoder.logits(hidden)

    def _sample(self, step: PreparedStep, seq_ids: Sequence[int], logits: torch.Tensor) -> list[SeqSample]:
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
        self.grammars.follow(self.grammars.held(seq_ids), samples)
        return samples

    def score(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Log-probabilities of ``token_ids`` in rows of raw ``logits``, as `kernels.sampling.token_logprobs`."""
        return token_logprobs(logits, torch.tensor(token_ids), num_top, backend=self._logprobs_backend)

    def _logits_of(self, batch: StepBatch) -> torch.Tensor:
        """``[num_logits, vocab_size]`` fp32."""
        return self.decoder.logits(self.decoder.forward(batch, self.kv.views))
