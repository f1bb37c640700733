"""Forward and sample on a GPU: a step is launched and not waited for, so that the host plans the next one meanwhile.

The ids drawn stay on the device: ``_last_ids[row]`` is the newest id of each of the worker's sequences, and a step
finds there those that the host does not know yet. Steps with rows that need the host between forward and draw
(penalties, masks, grammars) are waited for when they are launched.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

import quire.kernels.triton_ops  # noqa: F401  registers
from quire.clock import Clock, WallClock
from quire.config import EngineConfig
from quire.kernels import registry
from quire.kernels.sampling import token_logprobs
from quire.kernels.sampling.logprobs import assemble, logprob_tensors
from quire.kernels.sampling.triton import draw_rows, facts_of, logprobs_wanted, truncated
from quire.models.decoder import Decoder
from quire.quant.stored import Weight
from quire.request import TokenLogprobs
from quire.runner.device_batch import DeviceBatches, OnDevice
from quire.runner.grammars import Grammars
from quire.runner.graphs import DecodeGraphs
from quire.runner.input_batch import PreparedStep
from quire.runner.memory import KvCache, torch_dtype
from quire.runner.runner import ObserveLogits, Wait
from quire.runner.step_buffers import StepBuffers
from quire.runner.step_upload import StepUpload, recorded_event
from quire.sampling.rng import Purpose
from quire.sampling.sampler import Sampler, SeqSample

_log = logging.getLogger(__name__)


def torch_device(kind: str) -> torch.device:
    """The device of tensors for ``DeviceInfo.kind``."""
    return torch.device("cuda" if kind == "cuda" else "cpu")


class DeviceRunner:
    """Owns the model, the KV cache and the sampler of one worker. ``observe_logits`` as in `ModelRunner`."""

    def __init__(
        self, config: EngineConfig, weights: Iterable[tuple[str, Weight]], clock: Clock | None = None
    ) -> None:
        model = config.model
        self.device = torch_device(config.device.kind)
        kernels = registry.choose(config.runner.cpu_isa)
        with torch.inference_mode(), self.device:
            self.decoder = Decoder(
                model.spec, config.kv_layout, model.max_model_len, torch_dtype(model.dtype), kernels,
                formats=model.formats,
            )  # fmt: skip
        with torch.inference_mode():
            self.decoder.load(weights)
            self.decoder.cover(model.max_model_len)
        blocks, size = config.cache.num_blocks, config.cache.block_size
        # One page more than the scheduler knows: the tokens that fill a captured step up are stored there.
        self.kv = KvCache(
            model.spec, config.kv_layout, blocks + 1, size, model.kv_dtype, kernels, self.device
        )
        self.sampler = Sampler(model.spec.vocab_size, kernels)
        self.grammars = Grammars(model.tokenizer, model.spec.vocab_size, config.runner.num_threads)
        self.observe_logits: ObserveLogits | None = None
        self._batches = DeviceBatches(
            model.spec, config.kv_layout, self.kv.views, self.device,
            invariant=config.runner.cpu_isa == "invariant",
        )  # fmt: skip
        self._facts = StepUpload(self.device, torch.int64)
        self._last_ids = torch.zeros(4 * config.scheduler.max_num_seqs, dtype=torch.int32, device=self.device)
        self._block_size = size
        self._graphs: DecodeGraphs | None = None
        if config.runner.graphs:
            most = -(-model.max_model_len // size) + 1
            self._graphs = DecodeGraphs(
                self.device, config.scheduler.max_num_seqs, most, blocks, clock or WallClock()
            )

    def record(self, buffers: StepBuffers) -> None:
        """As `Runner.record`: graphs are captured later."""

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    @torch.inference_mode()
    def launch(self, step: PreparedStep, seq_ids: Sequence[int]) -> Wait:
        """As `Runner.launch`."""
        logits, rows = self._logits(step)
        if not seq_ids:
            return list
        self._observe(step, seq_ids, logits)
        columns = self.sampler.plain_columns(seq_ids)
        if columns is None or any(seq_id in self.grammars for seq_id in seq_ids):
            samples = self._sample(logits, seq_ids)
            ids = [max(sample.token_id, 0) for sample in samples]
            self._last_ids.index_copy_(0, rows.long(), torch.tensor(ids, dtype=torch.int32).to(self.device))
            return lambda: samples
        drawn, best = draw_rows(
            logits, self._facts.put([facts_of(columns)])[0], Purpose.DRAW, cut=truncated(columns)
        )
        self._last_ids.index_copy_(0, rows.long(), drawn.to(torch.int32))
        self.sampler.count_plain(seq_ids)
        on_host = self._fetch(drawn), self._fetch(best)
        rows_with, wanted = logprobs_wanted(columns)
        found: tuple[torch.Tensor, ...] = ()
        if wanted:
            of = logits if len(wanted) == len(seq_ids) else logits[self._to_device(rows_with)]
            of_ids = drawn if len(wanted) == len(seq_ids) else drawn[self._to_device(rows_with)]
            widest = min(max(wanted), logits.shape[1])
            found = tuple(self._fetch(part) for part in logprob_tensors(of, of_ids.clamp_min(0), widest))
        done = recorded_event() if self.device.type == "cuda" else None

        def wait() -> list[SeqSample]:
            if done is not None:
                done.synchronize()
            ids, largest = (part.numpy() for part in on_host)
            logprobs: list[TokenLogprobs | None] = [None] * len(ids)
            if wanted:
                token_ids = [int(ids[row]) for row in rows_with]
                entries = assemble(token_ids, wanted, *(part.tolist() for part in found))
                for row, entry in zip(rows_with.tolist(), entries, strict=True):
                    logprobs[row] = entry
            return self.sampler.plain_samples(ids, largest, logprobs)

        return wait

    @torch.inference_mode()
    def run_with_rows(
        self, step: PreparedStep, seq_ids: Sequence[int], rows: npt.NDArray[np.int64]
    ) -> tuple[list[SeqSample], torch.Tensor]:
        """As `Runner.run_with_rows`; the hidden states come to the host."""
        made = self._batches.put(step)
        indices = torch.cat((made.batch.logits_indices, torch.from_numpy(rows).to(self.device, torch.int32)))
        hidden = self._forward(replace(made, batch=replace(made.batch, logits_indices=indices)))
        samples: list[SeqSample] = []
        if seq_ids:
            logits = self.decoder.logits(hidden[: len(seq_ids)])
            self._observe(step, seq_ids, logits)
            samples = self._sample(logits, seq_ids)
            ids = [max(sample.token_id, 0) for sample in samples]
            self._last_ids.index_copy_(
                0, made.sampling_rows.long(), torch.tensor(ids, dtype=torch.int32).to(self.device)
            )
        return samples, hidden[len(seq_ids) :].cpu()

    @torch.inference_mode()
    def logits_of_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [rows, hidden_size]`` → fp32 ``[rows, vocab_size]``, both in the host's memory."""
        return self.decoder.logits(hidden.to(self.device)).cpu()

    def score(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """As `Runner.score`."""
        return token_logprobs(logits, torch.tensor(token_ids), num_top)

    @torch.inference_mode()
    def idle(self) -> None:
        """As `Runner.idle`: a size of step that came before is captured."""
        if self._graphs is not None:
            self._graphs.capture_one(idle=True)

    def free_memory(self) -> None:
        """As `Runner.free_memory`: the graphs, and what torch keeps of freed memory."""
        if self._graphs is not None:
            self._graphs.drop()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _logits(self, step: PreparedStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[num_logits, vocab_size]`` fp32 and the rows of `InputBatch` that they draw for."""
        room = None
        if self._graphs is not None and step.num_tokens == step.num_seqs == len(step.sampling):
            room = self._graphs.room_for(step.num_seqs, -(-step.num_positions // self._block_size))
        generation = self._batches.upload.generation
        made = self._batches.put(step, room)
        if self._graphs is not None and self._batches.upload.generation != generation:
            self._graphs.drop()  # they read the buffers that were there before
        if room is None or self._graphs is None:
            return self.decoder.logits(self._forward(made)), made.sampling_rows
        logits = self._graphs.run(room, lambda: self.decoder.logits(self._forward(made)))
        return logits[: step.num_seqs], made.sampling_rows[: step.num_seqs]

    def _to_device(self, rows: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(rows).to(self.device, non_blocking=True)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy to the host; there once an event behind it has come."""
        pinned = self.device.type == "cuda"
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return host.copy_(tensor, non_blocking=True)

    def _forward(self, made: OnDevice) -> torch.Tensor:
        """Hidden rows that sample. Negative ids are of tokens that only the device knows."""
        ids = made.batch.input_ids
        newest = self._last_ids.index_select(0, (-1 - ids).clamp_min(0))
        batch = replace(made.batch, input_ids=torch.where(ids < 0, newest, ids))
        return self.decoder.forward(batch, self.kv.views)

    def _observe(self, step: PreparedStep, seq_ids: Sequence[int], logits: torch.Tensor) -> None:
        if self.observe_logits is None:
            return
        rows = step.buffers.logits_indices[: len(seq_ids)]
        positions = step.buffers.positions[rows].tolist()
        for seq_id, position, row in zip(seq_ids, positions, logits.cpu(), strict=True):
            self.observe_logits(seq_id, position, row)

    def _sample(self, logits: torch.Tensor, seq_ids: Sequence[int]) -> list[SeqSample]:
        """Draw with the host in between."""
        failed = self.grammars.apply(logits, seq_ids)
        samples = self.sampler.sample(logits, seq_ids)
        if failed:
            errors = {i: failed[seq_id] for i, seq_id in enumerate(seq_ids) if seq_id in failed}
            samples = [SeqSample(-1, error=errors[i]) if i in errors else s for i, s in enumerate(samples)]
        self.grammars.follow(seq_ids, samples)
        return samples
