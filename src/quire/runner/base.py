"""`Runner`: what a worker needs of whatever computes its steps: `model_runner` on a CPU, `device_runner` on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.models.decoder import Decoder
from quire.request import TokenLogprobs
from quire.runner.input_batch import PreparedStep, StepBuffers
from quire.runner.memory import KvCache
from quire.sampling.sampler import SeqSample

if TYPE_CHECKING:
    from quire.runner.states import StatePool
    from quire.sampling.grammars import Grammars

PendingResult = Callable[[], list[SeqSample]]  # waits for what a step sampled, and returns it
ObserveLogits = Callable[[int, int, Tensor], None]
Ints = npt.NDArray[np.int64]


class Runner(Protocol):
    """The model, its KV cache and the sampler of one worker."""

    decoder: Decoder
    kv: KvCache
    observe_logits: ObserveLogits | None

    @property
    def grammars(self) -> Grammars:
        """What builds and follows grammars."""
        ...

    @property
    def states(self) -> StatePool | None:
        """Of recurrent layers, where there are some."""

    def record(self, buffers: StepBuffers) -> None:
        """Get ready for the steps of ``buffers``."""
        ...

    def launch(self, step: PreparedStep) -> PendingResult:
        """Begin to compute the step, if not do it; the result is in the order of ``step.sampling``."""
        ...

    def run_with_hidden(self, step: PreparedStep, tokens: Ints) -> tuple[PendingResult, Tensor | None]:
        """As `launch`; also return the hidden states of ``tokens`` of it: ``[len(tokens), hidden_size]``.

        They are those after the last norm; None: a later stage has them.
        """
        ...

    def logits_of(self, hidden: Tensor, adapter_slot: int) -> Tensor:
        """``hidden [rows, hidden_size]`` of one sequence → fp32 ``[rows, vocab_size]``, both in the host's memory."""
        ...

    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
        """Log-probabilities of ``token_ids`` in rows of raw ``logits``, as `kernels.sampling.logprobs`."""
        ...

    def idle(self) -> None:
        """No step is in flight, and none was planned: do some of what would delay one."""
        ...

    def free_memory(self) -> None:
        """Give back what is kept for speed alone: a step found too little memory."""
        ...
