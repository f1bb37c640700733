"""A tier of KV blocks beyond the memory of the engine: which spans of prompts are loaded, and which are stored.

    load     before a sequence enters, what the tier has of its prompt and the prefix tree has not, where loading it is
             predicted to be quicker than computing it
    store    the blocks of a prompt that was computed, one piece after another, front to back

The times of both are measured. Where loads lose, spans are computed, and a load is tried again after many prompts. A
sequence whose load takes much longer than predicted is computed instead, and nothing else is loaded until that load has
ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire.request import TokenEvent
from quire.scheduler.policies.tier_rows import Computed, Tier, TierRows
from quire.scheduler.policy import Policy
from quire.scheduler.predictor import Mean
from quire.scheduler.sequence import Sequence, StepRecord
from quire.scheduler.state import SchedulerState
from quire.step import StepResult


@dataclass(slots=True)
class Load:
    """A load that has not ended."""

    begun_s: float
    limit_s: float  # its sequences wait until then
    num_blocks: int
    num_bytes: int
    rows: list[bytes]  # hashes of the rows that need no computation then
    # A peer may be computing it still: how long it takes says nothing of the tier.
    is_awaited: bool = False
    is_late: bool = False


class Store(NamedTuple):
    """The store that is open, and what is left of its prompt then."""

    transfer_id: int
    rest: Computed


class LoadCost:
    """Predicts how long a load takes, by those that have ended."""

    def __init__(self) -> None:
        self._delay_s = Mean()  # from the decision to the end, without the reading
        self._byte_s = Mean()

    def note(self, took_s: float, read_s: float, num_bytes: int) -> None:
        """A load of ``num_bytes`` has ended."""
        self._delay_s.add(max(0.0, took_s - read_s))
        self._byte_s.add(read_s / num_bytes)

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds of a load; 0 where none has ended yet."""
        return self._delay_s.value + num_bytes * self._byte_s.value

    def forgive(self) -> None:
        """A load was not worth it: after many of these the tier is tried again, since it may have become quicker."""
        self._delay_s.value *= 0.98
        self._byte_s.value *= 0.98


class Rule(Policy):
    """The loads and stores of one scheduler with one tier."""

    def __init__(self, state: SchedulerState, *, patience_s: float = 0.5, poll_s: float = 0.002) -> None:
        """``patience_s``: a load may take so long at least; ``poll_s``: between looks for ends while nothing runs."""
        self._state = state
        self._patience_s, self._poll_s = patience_s, poll_s
        self._tier: Tier
        self._rows: TierRows
        self._transfers: Any = None
        self._num_groups = state.cache.windows.num_groups
        self.cost = LoadCost()
        self.loads: dict[int, Load] = {}
        self._store: Store | None = None
        self._looked_at: dict[Sequence, int] = {}  # in which epoch
        self._computed: deque[Computed] = deque(maxlen=state.config.max_num_seqs)
        self.num_declined = 0  # loads that would have taken longer than the computation

    def connect(self, tier: Tier) -> None:
        """Ask ``tier`` from now on; before the first request."""
        self._tier = tier
        self._rows = TierRows(self._state, tier)
        self._transfers = self._state.policies.turn_on("transfers")

    def before_plan(self, now: float) -> None:
        """Take in what has ended, and begin what comes next."""
        self._take_ended(now)
        for seq in self._candidates():
            self._consider(seq, now)
        if self._store is None and self._computed:
            self._store_next()

    def on_step(self, record: StepRecord, result: StepResult, took_s: float) -> None:
        """Note the prompts whose last token was computed. Blocks of a failed one have left the prefix tree."""
        if not record.num_prompt_tokens:
            return
        for seq, plan in zip(record.sequences, record.seqs, strict=True):
            start, end = plan.num_computed_tokens, plan.num_computed_tokens + plan.num_scheduled_tokens
            num_rows = min(end, seq.num_prompt) // self._state.cache.block_size
            kv = seq.group.request.terms.kv
            is_whole = seq.num_prompt <= end
            is_due = is_whole or (kv is not None and kv.gives)  # a peer takes each chunk at once
            if (
                start < seq.num_prompt
                and is_due
                and num_rows
                and seq.table.publishes
                and not _is_private(seq)
            ):
                self._computed.append(Computed(seq.table.chain[:num_rows], goes_on=not is_whole))

    def on_end(self, seq: Sequence) -> None:
        """It is forgotten, and a state at its answer's end is stored."""
        self._looked_at.pop(seq, None)
        answer = None if _is_private(seq) else self._rows.answer_of(seq)
        if answer is not None:
            self._computed.append(answer)

    def expire(self, now: float) -> list[TokenEvent]:
        """Let sequences be computed whose load takes too long."""
        for transfer_id, load in self.loads.items():
            if not load.is_late and now >= load.limit_s:
                load.is_late = True
                self._transfers.leave(transfer_id)
        return []

    def wakes_at(self) -> float | None:
        """Look for ends soon, while there is a transfer."""
        return self._state.now + self._poll_s if self.loads or self._store is not None else None

    def _take_ended(self, now: float) -> None:
        for ended in self._tier.take_ended():
            transfer_id, num_blocks, _ = ended.done
            load = self.loads.pop(transfer_id, None)
            if load is not None and num_blocks:
                is_whole = num_blocks == load.num_blocks
                num_rows = num_blocks // self._num_groups
                if self._rows.has_states:
                    num_rows = len(load.rows) if is_whole else 0
                self._tell(transfer_id, num_rows * self._state.cache.block_size)
                if not load.is_awaited:
                    num_bytes = load.num_bytes * num_blocks // load.num_blocks
                    self.cost.note(now - load.begun_s, ended.seconds, num_bytes)
            store = self._store
            if store is not None and transfer_id == store.transfer_id:
                self._store = None
                if ended.done.error is None and store.rest.num_seen < len(store.rest.chain):
                    self._computed.appendleft(store.rest)
            self._transfers.end((ended.done,))
        live = self._state.cache.references.transfers
        if any(transfer_id not in live for transfer_id in self.loads):  # the step that began them failed
            self.loads = {key: load for key, load in self.loads.items() if key in live}
        if self._store is not None and self._store.transfer_id not in live:
            self._store = None

    def _tell(self, transfer_id: int, num_tokens: int) -> None:
        """Note with the requests that wait for a load how many tokens it brought."""
        for seq, waited_for in self._transfers.loading.items():
            if waited_for == transfer_id and not seq.group.admitted:
                seq.group.num_loaded_tokens += num_tokens

    def _candidates(self) -> Iterable[Sequence]:
        """Return the sequences that enter next and were not looked at, as far as all have room in half of the pool.

        Blocks that are loaded too early would only displace others.
        """
        state, cache = self._state, self._state.cache
        if not state.waiting or any(load.is_late for load in self.loads.values()):
            return ()
        num_left = cache.pool.num_blocks // 2 - sum(load.num_blocks for load in self.loads.values())
        candidates: list[Sequence] = []
        for seq in state.waiting.first(state.config.max_num_seqs):
            num_left -= self._num_groups * (len(seq.token_ids) // cache.block_size)
            if candidates and num_left < 0:
                break
            if self._looked_at.get(seq) != seq.epoch:
                candidates.append(seq)
        return candidates

    def _consider(self, seq: Sequence, now: float) -> None:
        """Load what the tier has of the prompt of ``seq`` behind what the prefix tree has, if that pays."""
        state, cache = self._state, self._state.cache
        self._looked_at[seq] = seq.epoch
        if not seq.group.reads_prefix or _is_private(seq):
            return
        seq.table.reads_prefix = True
        num_hit, chain = len(cache.match(seq.table, seq.token_ids).nodes), seq.table.chain
        if num_hit == len(chain):
            return
        for transfer_id, load in self.loads.items():
            if chain[num_hit] in load.rows:
                del self._looked_at[seq]  # it may lack more than what comes
                self._transfers.join(seq, transfer_id)
                return
        wanted = self._rows.to_load(seq, num_hit)
        if wanted is None:
            return
        load_s = self.cost.seconds(wanted.num_bytes)
        compute_s = (wanted.end - num_hit) * cache.block_size * state.predictor.prompt_token_s
        if 0.0 < compute_s <= load_s:
            self.num_declined += 1
            self.cost.forgive()
            return
        transfer_id = self._transfers.load_for(seq, self._tier.name, wanted.end, wanted.giver)
        if transfer_id is not None:
            limit_s = now + max(self._patience_s, 2 * compute_s)
            num_blocks = (wanted.end - wanted.first) * self._num_groups + self._rows.has_states
            rows = chain[num_hit : wanted.end]
            self.loads[transfer_id] = Load(
                now, limit_s, num_blocks, wanted.num_bytes, rows, wanted.is_awaited
            )

    def _store_next(self) -> None:
        """Begin to store the first piece that the tier lacks of a prompt; a piece holds few blocks of the pool."""
        piece = max(1, self._state.cache.pool.num_blocks // (8 * self._num_groups))
        while self._computed and self._store is None:
            computed = self._computed.popleft()
            rows, num_seen = self._rows.to_store(computed, piece)
            if not rows:
                continue
            transfer_id = self._transfers.store(rows[-1], self._tier.name, len(rows))
            if transfer_id is not None:
                self._store = Store(transfer_id, computed._replace(num_seen=num_seen))


def _is_private(seq: Sequence) -> bool:
    """Whether a request's salt is its own id: it is to be computed, and nothing of it is of use to another."""
    return seq.group.request.terms.cache_salt == seq.request_id
