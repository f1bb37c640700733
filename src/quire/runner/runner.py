"""`Runner`: what a worker needs of whatever computes its steps: `model_runner` on a CPU, `device_runner` on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.models.decoder import Decoder
from quire.request import TokenLogprobs
from quire.runner.grammars import Grammars
from quire.runner.input_batch import PreparedStep
from quire.runner.memory import KvCache
from quire.runner.step_buffers import StepBuffers
from quire.sampling.sampler import SeqSample
from quire.step import NewSeq

Wait = Callable[[], list[SeqSample]]  # returns what a step drew, once it is there
ObserveLogits = Callable[[int, int, torch.Tensor], None]


class SamplingState(Protocol):
    """What draws for the worker's sequences: `Sampler` on a CPU, `DeviceSampler` on a GPU."""

    def add(self, new_seq: NewSeq) -> None:
        """Take a sequence, or take it anew. Raises `RequestError` where its params name an id that there is not."""
        ...

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; an unknown one is fine."""
        ...


class Runner(Protocol):
    """The model, its KV cache and the sampler of one worker."""

    decoder: Decoder
    kv: KvCache
    grammars: Grammars
    observe_logits: ObserveLogits | None

    @property
    def sampler(self) -> SamplingState: ...

    def record(self, buffers: StepBuffers) -> None:
        """Get ready for the steps of ``buffers``."""
        ...

    def launch(self, step: PreparedStep, seq_ids: Sequence[int]) -> Wait:
        """Begin to compute the step, if not do it; ``seq_ids`` own its rows of logits, in that order."""
        ...

    def run_with_rows(
        self, step: PreparedStep, seq_ids: Sequence[int], rows: npt.NDArray[np.int64]
    ) -> tuple[list[SeqSample], torch.Tensor]:
        """Compute the step; also return the hidden states of ``rows``, after the last norm: ``[rows, hidden]``."""
        ...

    def logits_of_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [rows, hidden_size]`` → fp32 ``[rows, vocab_size]``, both in the host's memory."""
        ...

    def score(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Log-probabilities of ``token_ids`` in rows of raw ``logits``, as `kernels.sampling.token_logprobs`."""
        ...

    def idle(self) -> None:
        """No step is in flight, and none was planned: do some of what would delay one."""
        ...

    def free_memory(self) -> None:
        """Give back what is kept for speed alone: a step found too little memory."""
        ...
