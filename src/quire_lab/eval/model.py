"""A model as `quire eval` uses it: the engine's own worker, asked for the hidden states of whole prompts.

The prompt takes the path of prompt log-probabilities, in steps of as many tokens as a server's. Logits are made from
hidden states for as few rows at a time as the caller asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.args import EngineArgs
from quire.clock import Clock
from quire.config import DeviceInfo, EngineConfig
from quire.engine.build import make_executor
from quire.errors import StepError
from quire.models.checkpoint import Checkpoint, describe, read_tokenizer
from quire.models.hub import locate
from quire.models.loader import iter_weights
from quire.request import SamplingParams
from quire.resolve import resolve
from quire.runner.memory import torch_dtype
from quire.runner.prompt_outputs import PromptOutput, PromptScorer, Span
from quire.step import NewSeq, SeqPlan, StepPlan
from quire.text.tokenizer import Tokenizer
from quire.weight_table import weight_table

_NO_ADAPTER = 0  # slot
_NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model whose weights are not loaded yet. ``expanded``: quantized weights are read as plain numbers."""

    config: EngineConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    expanded: bool

    @property
    def max_len(self) -> int:
        return self.config.model.max_model_len

    @property
    def vocab_size(self) -> int:
        return self.config.model.spec.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are held."""
        model = self.config.model
        return sum(row.num_bytes for row in weight_table(model.spec, model.dtype, model.formats))


def find_model(args: EngineArgs, device: DeviceInfo, *, expand: bool = False) -> FoundModel:
    """Find the model of ``args`` and read its configuration and tokenizer.

    ``expand``: treat a quantized checkpoint as the plain one that its numbers make, which may be quantized anew.
    Raises `ModelLoadError` and `ConfigError`, as `quire.engine.assemble.configure`.
    """
    checkpoint = describe(locate(args.model, revision=args.revision), args.load_format)
    config = resolve(
        args, checkpoint.spec, device, path=str(checkpoint.path),
        tokenizer=str(args.tokenizer or checkpoint.tokenizer), stored={} if expand else checkpoint.formats,
        remarks=checkpoint.remarks,
    )  # fmt: skip
    return FoundModel(config, checkpoint, read_tokenizer(Path(config.model.tokenizer)), expand)


def original_args(args: EngineArgs, model: str | None = None) -> EngineArgs:
    """Return the settings of an original that is computed in fp32: of the same model, or of ``model``."""
    chosen = args if model is None else EngineArgs(model=model, load_format=args.load_format)
    return replace(
        chosen, dtype="float32", quantize=None, quantize_head=None, kv_dtype="auto", packed_cache="off",
        device=args.device, threads=args.threads, cpu_isa=args.cpu_isa,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )  # fmt: skip


class HiddenStates(PromptScorer):
    """Takes the place of a worker's scorer: keeps the hidden states of the prompt in ``rows``, and scores nothing."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def outputs(self, spans: Sequence[Span], hidden: Tensor) -> dict[int, PromptOutput]:
        """Keep the rows of one sequence, ``[num_tokens, hidden_size]``; the runner may write over its own."""
        assert len(spans) == 1
        self.rows.append(hidden.clone())
        return {}


class LoadedModel:
    """A model with its weights, for prompts of up to ``max_tokens`` one after the other."""

    def __init__(self, source_model: FoundModel, max_tokens: int, clock: Clock) -> None:
        """Load the weights. Raises `ModelLoadError`."""
        config = source_model.config
        size, groups = config.cache.block_size, len(config.kv_layout.groups)
        self._num_blocks = -(-max_tokens // size) + 1  # per group
        cache = replace(config.cache, num_blocks=groups * self._num_blocks, enable_prefix_caching=False)
        scheduler = replace(config.scheduler, max_num_seqs=1)
        self.config = replace(config, cache=cache, scheduler=scheduler)
        weights = None
        if source_model.expanded:
            model = replace(config.model, formats={})
            weights = iter_weights(model, torch_dtype(model.dtype))
        executor: Any = make_executor(self.config, "local", clock, weights=weights)
        self._executor = executor
        self._states = HiddenStates()
        self._executor.worker.scorer = self._states
        self._clock = clock
        self._seq_id = -1
        self.num_tokens, self.seconds = 0, 0.0  # computed so far, hidden states and logits together

    def hidden(self, token_ids: Sequence[int], chunk: int | None = None) -> Tensor:
        """Return the hidden states of all tokens but the last: ``[len(token_ids) - 1, hidden_size]``.

        ``chunk``: tokens of a step, by default as many as a server's.

        Raises:
            StepError: the engine failed.
        """
        start_s = self._clock.now()
        self._states.rows.clear()
        gone = (self._seq_id,) if self._seq_id >= 0 else ()
        self._seq_id += 1
        new = NewSeq(self._seq_id, 0, tuple(token_ids), (), _NO_SAMPLING, 0, prompt_logprobs=0, state_slot=0)
        most = chunk or self.config.scheduler.max_num_batched_tokens
        for start in range(0, len(token_ids), most):
            plan = self._plan(start, min(most, len(token_ids) - start))
            self._run(StepPlan(start, () if start else (new,), (plan,), () if start else gone))
        self.num_tokens += len(token_ids)
        rows = torch.cat(self._states.rows)
        self.seconds += self._clock.now() - start_s
        assert len(rows) == len(token_ids) - 1
        return rows

    def _plan(self, start: int, count: int) -> SeqPlan:
        """Plan tokens of the one sequence; its blocks are all given with the first of them."""
        if start:
            return SeqPlan(self._seq_id, 0, start, count)
        groups = range(len(self.config.kv_layout.groups))
        blocks = tuple(tuple(range(g * self._num_blocks, (g + 1) * self._num_blocks)) for g in groups)
        return SeqPlan(self._seq_id, 0, 0, count, (0,) * len(groups), blocks)

    def _run(self, plan: StepPlan) -> None:
        self._executor.submit(plan)
        result = self._executor.collect()
        error = result.error or next((seq.error for seq in result.seqs if seq.error), None)
        if error is not None:
            raise StepError(f"{self.config.model.name}: a step failed: {error}")

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [rows, hidden_size]`` → fp32 ``[rows, vocab_size]``, in the host's memory."""
        start_s = self._clock.now()
        logits: Tensor = self._executor.worker.runner.logits_of(hidden, _NO_ADAPTER)
        self.seconds += self._clock.now() - start_s
        return logits

    def close(self) -> None:
        """Give the weights and the cache back."""
        self._executor.close()
