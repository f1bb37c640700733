"""`ModelRunner`: forward and sample on a CPU. The tensors of a step → a `SeqSample` for every sequence that samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.kernels import registry
from quire.kernels.lora import AdapterRows, group_rows
from quire.kernels.sampling.logprobs import token_logprobs
from quire.kernels.tape import NotRecordable, StepTape
from quire.kv_layout import KV_CODE_BITS
from quire.layers.attention import StepBatch
from quire.layers.context import ContextParallel
from quire.layers.weights import WHOLE, Stage, TensorParallel
from quire.models.decoder import Decoder, Hidden
from quire.parallel.shard import Shard
from quire.quant.stored import Weight
from quire.request import TokenLogprobs
from quire.runner.base import Ints, ObserveLogits, PendingResult
from quire.runner.draft_chain import Recorded
from quire.runner.input_batch import PreparedStep, StepBuffers
from quire.runner.memory import KvCache, torch_dtype
from quire.runner.sequences import WorkerSeq
from quire.sampling.sampler import Columns, Sampler, SeqSample

if TYPE_CHECKING:
    from quire.runner.stage_links import StageLinks
    from quire.runner.states import StatePool
    from quire.sampling.grammars import Grammars

_log = logging.getLogger(__name__)

# Of a step that was verified: rows of logits per sequence, and the hidden states [num_logits, hidden_size].
WatchSampled = Callable[[PreparedStep, Sequence[int], Tensor], None]


class ModelRunner:
    """The runner of a CPU.

    ``observe_logits(seq_id, position, row)`` sees every row of raw logits that samples (tests set it); the row's memory
    is the next step's.
    """

    def __init__(
        self,
        config: EngineConfig,
        weights: Iterable[tuple[str, Weight]],
        *,
        tp: TensorParallel | None = None,
        cp: ContextParallel | None = None,
        links: StageLinks | None = None,
        samples: bool = True,
    ) -> None:
        """``tp``: the ranks that share the layers; ``cp``: those that share the caches; ``links``: to other pipeline
        stages; ``config`` is then this rank's (`rank_config`). ``samples``: else another rank does, and `launch` gives
        nothing.
        """
        model = config.model
        self._links, self._samples, self._cp = links, samples, cp
        stage = WHOLE if links is None else Stage(links.entering is None, links.is_last)
        kernels = registry.choose(config.runner)
        self.decoder = Decoder(
            model.spec, config.kv_layout, model.max_model_len, torch_dtype(model.dtype), kernels, cp=cp,
            formats=model.formats, lora=config.lora, tp=tp, stage=stage, rope_on_demand=True, wide_sums=True,
        )  # fmt: skip
        with torch.inference_mode():
            self.decoder.load(weights)
        if config.speculate is not None:
            self.decoder.cover()  # branches lie beyond the positions of their step
        cache, speculate = config.cache, config.speculate
        num_blocks = cache.num_blocks + (0 if speculate is None else speculate.num_branch_blocks)
        stripe = None if cp is None else cp.stripe
        block_size = cache.block_size if stripe is None else stripe.size
        self.kv = KvCache(
            model.spec, config.kv_layout, num_blocks, block_size, model.kv_dtype, kernels, stripe=stripe,
            factors=import_module("quire.layers.key_balance").factors_by_layer(self.decoder.own_layers)
            if model.kv_dtype in KV_CODE_BITS else None,
        )  # fmt: skip
        self.states: StatePool | None = None
        if model.spec.state_layers:
            self.states = import_module("quire.runner.states").StatePool(model.spec, cache.num_state_slots)
        accept = "exact" if speculate is None else speculate.accept
        self._sampler = Sampler(model.spec.vocab_size, kernels, accept)
        self._token_logprobs = kernels.of(token_logprobs)
        self._grammar_settings = model.tokenizer, model.spec.vocab_size, config.runner.num_threads
        self._grammars: Grammars | None = None
        self.observe_logits: ObserveLogits | None = None
        self.watch_sampled: WatchSampled | None = None
        # Hidden states that gave the logits, of the last step and of every recorded one, where they are watched.
        self._hidden = self._taped_hidden = torch.empty(0)
        self.tape: StepTape | None = None
        self._taped: StepBuffers | None = None  # whose steps `tape` computes
        self.recorded: Recorded | None = None  # the same for `runner.draft_chain`
        self.call_by_call = ""  # why steps are not replayed; empty: they are
        self._is_rank = config.runner.backend == "native" and config.topology.world_size > 1
        self._leaving: Hidden | None = None  # the tape's, on a stage that is not the last

    @property
    def grammars(self) -> Grammars:
        """As `Runner.grammars`; made with the first sequence that has one."""
        if self._grammars is None:
            self._grammars = import_module("quire.sampling.grammars").Grammars(*self._grammar_settings)
        return self._grammars

    @torch.inference_mode()
    def record(self, buffers: StepBuffers) -> None:
        """As `Runner.record`: the step is recorded, so that it is replayed, if the model is native throughout."""
        batch, links = buffers.whole, self._links
        entering = None if links is None else links.room_for(buffers.max_tokens)

        def forward() -> Tensor:
            if self.decoder.stage.is_last:
                return self._logits(batch, entering)
            self._leaving = self.decoder.layers(batch, self.kv.views, entering)
            return self._leaving[0]

        try:
            self.tape = StepTape(forward, buffers.max_tokens, buffers.max_seqs)
        except NotRecordable as reason:
            self.call_by_call = str(reason)
            # A rank waits for the slowest at every collective: this one makes all of them slower.
            level = logging.WARNING if self._is_rank else logging.INFO
            _log.log(level, "steps run call by call: %s", reason)
        else:
            self._taped, self._taped_hidden = buffers, self._hidden
            self.recorded = Recorded(self.tape, buffers)
            _log.info("a step is %d recorded calls", len(self.tape))

    def launch(self, step: PreparedStep) -> PendingResult:
        """As `Runner.launch`: the step is computed at once."""
        if not self._samples:
            with torch.inference_mode():
                self._compute(step)
            return list
        samples = self.run(step)
        return lambda: samples

    def idle(self) -> None:
        """As `Runner.idle`: nothing was put off."""

    def free_memory(self) -> None:
        """As `Runner.free_memory`: nothing is kept."""

    @torch.inference_mode()
    def run(self, step: PreparedStep) -> list[SeqSample]:
        """Compute the step; return what `PreparedStep.sampling` got."""
        logits = self._compute(step)
        assert logits is not None
        return self._sample(step, logits)

    @torch.inference_mode()
    def compute(self, step: PreparedStep) -> torch.Tensor:
        """Compute the step; return its logits: fp32 ``[num_logits, vocab_size]``."""
        logits = self._compute(step)
        assert logits is not None
        return logits

    def _compute(self, step: PreparedStep) -> torch.Tensor | None:
        """Compute the step; return its logits, or None where the next stage goes on with it."""
        links, logits, leaving = self._links, None, self._leaving
        entering = step.entering if links is None else links.receive(step.num_tokens)
        divided = self._divides(step)
        self.decoder.cover(step.num_positions)
        if self.tape is not None and step.buffers is self._taped and not divided and step.entering is None:
            step.buffers.set_num_seqs(step.num_seqs)
            self._hidden = self._taped_hidden
            logits = self.tape.run(step.num_tokens, step.num_logits)
        elif self.decoder.stage.is_last:
            logits = self._logits(step.batch_of(divided=divided), entering)
        else:
            leaving = self.decoder.layers(step.batch_of(divided=divided), self.kv.views, entering)
        if links is None or links.is_last:
            return logits
        assert leaving is not None
        links.send(leaving, step.num_tokens)
        return None

    @torch.inference_mode()
    def run_with_hidden(self, step: PreparedStep, tokens: Ints) -> tuple[PendingResult, Tensor | None]:
        """As `Runner.run_with_hidden`.

        Call by call, since a recorded step has no more than the rows that sample after its last layer.
        """
        if not self.decoder.stage.is_last:
            self._compute(step)
            return list, None
        self.decoder.cover(step.num_positions)
        entering = None if self._links is None else self._links.receive(step.num_tokens)
        batch = with_hidden_of(step.batch_of(divided=self._divides(step)), step, tokens)
        hidden = self.decoder.forward(batch, self.kv.views, entering or step.entering)
        sampling, others = hidden[: step.num_logits], hidden[step.num_logits :]
        logits = self.decoder.logits(sampling, step.batch.end_logits) if step.sampling else None
        self._hidden = sampling
        samples = [] if logits is None or not self._samples else self._sample(step, logits)
        return lambda: samples, others

    @torch.inference_mode()
    def logits_of(self, hidden: Tensor, adapter_slot: int) -> Tensor:
        return self.decoder.logits(hidden, rows_of_slot(hidden.shape[0], adapter_slot))

    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        return self._token_logprobs(logits, torch.tensor(token_ids), num_top)

    def _sample(self, step: PreparedStep, logits: Tensor) -> list[SeqSample]:
        if self.observe_logits is not None:
            observe(self.observe_logits, step, logits)
        if self.watch_sampled is None:
            return sample(logits, step.sampling, step.columns, self._sampler)
        counts = [seq.num_logits for seq in step.sampling]
        samples = sample(logits, step.sampling, step.columns, self._sampler)
        if counts:
            self.watch_sampled(step, counts, self._hidden[: step.num_logits])
        return samples

    def _divides(self, step: PreparedStep) -> bool:
        """Whether ranks divide the rows of the step. It is then not replayed, for which it is large enough."""
        return self._cp is not None and self._cp.divides(step.num_tokens)

    def _logits(self, batch: StepBatch, entering: Hidden | None) -> Tensor:
        """``[num_logits, vocab_size]`` fp32."""
        hidden = self.decoder.forward(batch, self.kv.views, entering)
        if self.watch_sampled is not None:
            self._hidden = hidden
        return self.decoder.logits(hidden, batch.end_logits)


def sample(logits: Tensor, seqs: Sequence[WorkerSeq], columns: Columns, sampler: Sampler) -> list[SeqSample]:
    """Return what each of ``seqs`` got of its rows of ``logits``, and advance its states.

    Plain sequences have one row each, and are sampled as they are. `verify` samples where one has a state, or no
    finite logits.
    """
    if not seqs:
        return []
    samples = None
    if not any(seq.states for seq in seqs):
        samples = sampler.sample_plain(logits, columns)
    if samples is None:
        samples = import_module("quire.runner.verify").verify(logits, seqs, columns, sampler)
    return samples


def rank_config(config: EngineConfig, shard: Shard) -> EngineConfig:
    """Return ``config`` with the layers, formats and cache layout that a rank has."""
    # Heads that draft may need the ends of the model, which other ranks have.
    ends = {
        n: config.model.formats[n] for n in ("embed.weight", "lm_head.weight") if n in config.model.formats
    }
    model = replace(config.model, spec=shard.spec, formats=ends | shard.formats(config.model.formats))
    return replace(config, model=model, kv_layout=shard.kv_layout(config.kv_layout))


def rows_of_slot(num_rows: int, adapter_slot: int) -> AdapterRows | None:
    """Return the grouping of rows that all have the adapter in ``adapter_slot``; 0: none."""
    return group_rows(np.full(num_rows, adapter_slot), adapter_slot) if adapter_slot else None


def with_hidden_of(batch: StepBatch, step: PreparedStep, tokens: Ints) -> StepBatch:
    """Return the ``batch`` of ``step`` whose last layer also continues with ``tokens``, after those that sample."""
    rows = np.concatenate((step.buffers.logits_indices[: step.num_logits], tokens))
    adapters = batch.adapters
    if adapters is not None:
        adapters = replace(adapters, logits=adapters.tokens.take(rows))
    return replace(batch, logits_indices=torch.from_numpy(rows).to(batch.logits_indices), adapters=adapters)


def observe(observer: ObserveLogits, step: PreparedStep, logits: Tensor) -> None:
    """Show ``observer`` each row of ``logits: [num_logits, vocab_size]``, on the host, with its position."""
    owners = [seq for seq in step.sampling for _ in range(seq.num_logits)]
    positions = step.buffers.positions[step.buffers.logits_indices[: step.num_logits]].tolist()
    for seq, position, row in zip(owners, positions, logits, strict=True):
        observer(seq.seq_id, position, row)
