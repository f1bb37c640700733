"""Disaggregation: some replicas compute prompts, the others decode, and K and V travel over links between them.

    prefill replica     computes the prompt and the first token        (DistServe, arXiv:2401.09670)
    link                one per prefill replica, one transfer at a time: latency + bytes / bandwidth
    decode replica      waits for the blocks as the scheduler waits for any `KvTransfer`, then decodes

The last, partial block of a prompt does not travel; the decode replica computes its tokens again. The blocks of a
prefill replica count as free once its part is over, also while they travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.engine.messages import LoadKv, TransfersDone
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.request import FinishReason, Request, TokenEvent
from quire.step import KvTransfer, StepPlan, StepResult, TransferDone
from quire_lab.sim.requests import Sent


@dataclass(frozen=True, slots=True)
class Pools:
    """Replicas 0 … ``num_prefill`` − 1 compute prompts, the ``num_decode`` behind them decode."""

    num_prefill: int
    num_decode: int
    block_bytes: float  # K and V of one block, on all devices of a replica
    bandwidth: float  # bytes/s of a prefill replica's link
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str, block_bytes: float, bandwidth: float) -> Pools:
        """Read ``P:D``, the numbers of prefill and decode replicas.

        Raises:
            ConfigError: it is not two numbers of at least 1.
        """
        first, _, second = text.partition(":")
        if not (first.isdecimal() and second.isdecimal() and int(first) and int(second)):
            raise ConfigError(
                f"disaggregate = {text!r} must be P:D, the numbers of prefill and decode replicas, as 1:3"
            )
        return cls(int(first), int(second), block_bytes, bandwidth)


@dataclass(frozen=True, slots=True)
class Transferred:
    """All transfers of a simulation."""

    num_transfers: int = 0
    num_bytes: float = 0.0
    wait_s: float = 0.0  # for the link
    move_s: float = 0.0


class Linked:
    """An executor that reports the transfers which a plan begins."""

    def __init__(self, inner: Executor, began: Callable[[KvTransfer], None]) -> None:
        self._inner, self._began = inner, began
        self.max_in_flight, self.chains_steps = inner.max_in_flight, inner.chains_steps

    def submit(self, plan: StepPlan) -> None:
        """Pass the plan on."""
        self._inner.submit(plan)
        for transfer in plan.transfers:
            self._began(transfer)

    def collect(self) -> StepResult:
        """Return the result of the oldest plan out."""
        return self._inner.collect()

    def close(self) -> None:
        """Close the inner executor."""
        self._inner.close()


class Handover:
    """Which part of a request is next, and when its blocks have come."""

    def __init__(
        self, pools: Pools, block_size: int, at: Callable[[float, Callable[[], None]], None],
        tell: Callable[[int, TransfersDone], None],
    ) -> None:  # fmt: skip
        """``at`` schedules an event; ``tell`` gives a message to a replica's core, and wakes it."""
        self._pools, self._block_size, self._at, self._tell = pools, block_size, at, tell
        self._free_s = [0.0] * pools.num_prefill  # when each link is free
        self._from: dict[str, int] = {}  # request → replica that computed its prompt
        self.total = Transferred()

    def part(self, sent: Sent, request: Request) -> tuple[Request, frozenset[int]]:
        """Return what of ``request`` is computed next, and the replicas that may."""
        num_prefill, num_decode = self._pools.num_prefill, self._pools.num_decode
        if sent.token_times:
            return request, frozenset(range(num_prefill, num_prefill + num_decode))
        sampling = replace(request.sampling, max_tokens=min(1, request.sampling.max_tokens or 1))
        return replace(request, sampling=sampling), frozenset(range(num_prefill))

    def continues(self, sent: Sent, event: TokenEvent, replica: int) -> bool:
        """Tell whether ``event`` ends the first part of a request alone; it goes on elsewhere then."""
        if replica >= self._pools.num_prefill or event.finish_reason is not FinishReason.LENGTH:
            return False
        if len(sent.token_times) >= sent.source.num_output_tokens:
            return False
        self._from[event.request_id] = replica
        sent.handed_over = True
        if event.timing is not None:
            sent.num_cached_tokens = event.timing.num_cached_tokens
        return True

    def load(self, sent: Sent) -> LoadKv:
        """Return the message that lets the decode replica wait for the prompt's blocks."""
        request_id = sent.request.request_id
        num_blocks = len(sent.request.prompt_token_ids) // self._block_size
        return LoadKv(request_id, f"replica {self._from[request_id]}", num_blocks, request_id)

    def began(self, replica: int, transfer: KvTransfer, now: float) -> None:
        """``transfer`` to ``replica`` begins once the link is free."""
        link, num_bytes = self._from[transfer.handle], len(transfer.blocks) * self._pools.block_bytes
        start_s = max(now, self._free_s[link])
        move_s = self._pools.latency_s + num_bytes / self._pools.bandwidth
        self._free_s[link] = start_s + move_s
        t = self.total
        self.total = Transferred(
            t.num_transfers + 1, t.num_bytes + num_bytes, t.wait_s + start_s - now, t.move_s + move_s
        )
        done = TransfersDone((TransferDone(transfer.transfer_id, len(transfer.blocks)),))
        self._at(start_s + move_s, lambda: self._tell(replica, done))
