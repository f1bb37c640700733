"""Forward and sample on a GPU: a step is launched and not waited for, so that the host plans the next one meanwhile.

The ids sampled stay on the device: ``_last_ids[row]`` is the newest id of each of the worker's sequences, and a step
finds there those that the host does not know yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import quire.kernels.triton_ops  # noqa: F401  registers
from quire.clock import Clock, WallClock
from quire.config import EngineConfig
from quire.errors import StepError
from quire.kernels import registry
from quire.kernels.sampling.logprobs import token_logprobs
from quire.models.decoder import Decoder
from quire.quant.stored import Weight
from quire.request import TokenLogprobs
from quire.runner.base import Ints, ObserveLogits, PendingResult
from quire.runner.device_batch import DeviceBatches, OnDevice
from quire.runner.device_sampler import DeviceSampler
from quire.runner.graphs import StepGraphs
from quire.runner.input_batch import PreparedStep, StepBuffers
from quire.runner.memory import KvCache, torch_dtype
from quire.runner.model_runner import observe, rows_of_slot, with_hidden_of
from quire.sampling.grammars import Grammars
from quire.sampling.sampler import SeqSample


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
        kernels = registry.choose(config.runner)
        with torch.inference_mode(), self.device:
            self.decoder = Decoder(
                model.spec, config.kv_layout, model.max_model_len, torch_dtype(model.dtype), kernels,
                formats=model.formats, lora=config.lora,
            )  # fmt: skip
        with torch.inference_mode():
            self.decoder.load(weights)
        blocks, size = config.cache.num_blocks, config.cache.block_size
        # One block more than the scheduler knows: the tokens that fill up a captured step are stored there.
        # `quire.cost.states` refuses recurrent layers on a GPU.
        self.states = None
        self.kv = KvCache(
            model.spec, config.kv_layout, blocks + 1, size, model.kv_dtype, kernels, self.device
        )
        self.grammars = Grammars(model.tokenizer, model.spec.vocab_size, config.runner.num_threads)
        self.sampler = DeviceSampler(model.spec.vocab_size, self.grammars, self.device)
        self.observe_logits: ObserveLogits | None = None
        self._batches = DeviceBatches(
            model.spec, config.kv_layout, self.kv.views, self.device,
            backend=kernels.backend("attention"),
        )  # fmt: skip
        self._last_ids = torch.zeros(4 * config.scheduler.max_num_seqs, dtype=torch.int32, device=self.device)
        self._block_size = size
        self._graphs: StepGraphs | None = None
        if config.runner.graphs:
            most = -(-model.max_model_len // size) + 1
            self._graphs = StepGraphs(
                self.device, config.scheduler.max_num_seqs, most, blocks, clock or WallClock(),
                mixed=not config.runner.batch_invariant,
            )  # fmt: skip

    def record(self, buffers: StepBuffers) -> None:
        """As `Runner.record`: graphs are captured later."""

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    @torch.inference_mode()
    def launch(self, step: PreparedStep) -> PendingResult:
        _no_drafts(step)
        logits, rows = self._logits(step)
        return self._sample(step, logits, rows) if step.sampling else list

    @torch.inference_mode()
    def run_with_hidden(self, step: PreparedStep, tokens: Ints) -> tuple[PendingResult, Tensor]:
        """As `Runner.run_with_hidden`; the hidden states come to the host."""
        _no_drafts(step)
        made = self._batches.put(step)
        hidden = self._forward(replace(made, batch=with_hidden_of(made.batch, step, tokens)))
        samples: list[SeqSample] = []
        if step.sampling:
            logits = self.decoder.logits(hidden[: step.num_logits], made.batch.end_logits)
            samples = self._sample(step, logits, made.rows)()
        return lambda: samples, hidden[step.num_logits :].cpu()

    @torch.inference_mode()
    def logits_of(self, hidden: Tensor, adapter_slot: int) -> Tensor:
        adapters = rows_of_slot(hidden.shape[0], adapter_slot)
        return self.decoder.logits(hidden.to(self.device), adapters).cpu()

    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
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

    def _logits(self, step: PreparedStep) -> tuple[Tensor, Tensor]:
        """Return ``[num_logits, vocab_size]`` fp32, and the rows of `WorkerSeqs` whose next tokens they give."""
        shape, adapted = None, step.adapters is not None
        if self._graphs is not None and not self._changes_ends(step):
            width = -(-step.num_positions // self._block_size)
            shape = self._graphs.shape_for(step.num_tokens, step.num_seqs, width, adapted=adapted)
        generation = self._batches.upload.generation
        made = self._batches.put(step, shape)
        if self._graphs is not None and self._batches.upload.generation != generation:
            self._graphs.drop()  # they read the buffers that were there before
        if shape is None or self._graphs is None:
            return self.decoder.logits(self._forward(made), made.batch.end_logits), made.rows
        logits = self._graphs.run(shape, lambda: self.decoder.logits(self._forward(made)))
        return logits[: step.num_logits], made.rows[: step.num_logits]

    def _changes_ends(self, step: PreparedStep) -> bool:
        """Whether an adapter of the step changes an end of the model; such a step is not captured."""
        slots = self.decoder.ends.embedding.slots
        return slots is not None and step.adapters is not None and slots.changes(step.adapters.tokens)

    def _forward(self, made: OnDevice) -> Tensor:
        """Hidden states of the tokens that sample. A negative id stands for a token that only the device knows."""
        ids = made.batch.input_ids
        newest = self._last_ids.index_select(0, (-1 - ids).clamp_min(0))
        batch = replace(made.batch, input_ids=torch.where(ids < 0, newest, ids))
        return self.decoder.forward(batch, self.kv.views)

    def _sample(self, step: PreparedStep, logits: Tensor, rows: Tensor) -> PendingResult:
        """Sample the next tokens of ``rows`` of `WorkerSeqs`."""
        if self.observe_logits is not None:
            observe(self.observe_logits, step, logits.cpu())
        ids, pending = self.sampler.sample(logits, step.sampling, step.columns)
        self._last_ids.index_copy_(0, rows.long(), ids.to(torch.int32))
        return pending


def _no_drafts(step: PreparedStep) -> None:
    if step.num_logits > len(step.sampling):
        raise StepError("This step verifies drafts; on a GPU a sequence samples one token per step.")
