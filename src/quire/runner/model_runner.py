"""Forward and sample: the tensors of a step → one `SeqSample` for every sequence that samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from quire.config import EngineConfig
from quire.kernels import registry
from quire.layers.step_batch import StepBatch
from quire.models.decoder import Decoder
from quire.runner.memory import KvCache, torch_dtype
from quire.sampling.sampler import Sampler, SeqSample

ObserveLogits = Callable[[int, int, torch.Tensor], None]


class ModelRunner:
    """Owns the model, the KV cache and the sampler of one worker.

    ``observe_logits(seq_id, position, row)`` sees every row of raw logits that samples (tests set it).
    """

    def __init__(self, config: EngineConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        model = config.model
        kernels = registry.choose(config.runner.cpu_isa)
        self.decoder = Decoder(
            model.spec, config.kv_layout, model.max_model_len, torch_dtype(model.dtype), kernels
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
        self.sampler = Sampler(model.spec.vocab_size)
        self.observe_logits: ObserveLogits | None = None

    @torch.inference_mode()
    def run(self, batch: StepBatch, seq_ids: Sequence[int]) -> list[SeqSample]:
        """Compute the step; ``seq_ids`` own the rows of ``batch.logits_indices``, in that order."""
        hidden = self.decoder.forward(batch, self.kv.views)
        if not seq_ids:
            return []
        logits = self.decoder.logits(hidden)
        if self.observe_logits is not None:
            positions = batch.positions.index_select(0, batch.logits_indices).tolist()
            for seq_id, position, row in zip(seq_ids, positions, logits, strict=True):
                self.observe_logits(seq_id, position, row)
        return self.sampler.sample(logits, seq_ids)
