"""`TierRows`: which rows of a prompt a tier has that the prefix tree has not, and which it lacks.

A row is a block of tokens with the blocks of all cache groups. With recurrent layers, rows are loaded up to one after
which the tier has a state, since no prompt goes on elsewhere.

    prefix tree │ blocks and a state │ blocks │            tier     │ blocks … │ blocks │ blocks and a state │ blocks │
                0                  num_hit  first                                                          end
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import NamedTuple, Protocol

from quire.cache.carried_states import CarriedStates
from quire.cache.prefix_cache import extend_chain, group_block_hash
from quire.scheduler.sequence import Sequence
from quire.scheduler.state import SchedulerState
from quire.step import TransferDone


class Ended(Protocol):
    """The end of a transfer, which took ``seconds`` beside the steps."""

    @property
    def done(self) -> TransferDone: ...
    @property
    def seconds(self) -> float: ...


class Tier(Protocol):
    """Where blocks are kept, as the scheduler sees it. ``contains`` does no I/O."""

    block_bytes: int

    @property
    def name(self) -> str:
        """As in `KvTransfer.remote`."""
        ...

    def contains(self, keys: SequenceABC[bytes]) -> int:
        """Return how many leading blocks it has, by the hashes of their content."""
        ...

    def kept(self, keys: SequenceABC[bytes]) -> int:
        """Return how many leading blocks need not be stored."""
        ...

    def take_ended(self) -> SequenceABC[Ended]:
        """Return the transfers that have ended since the last call."""
        ...


class Wanted(NamedTuple):
    """Rows to load: those from ``first`` on are missing, and ``end`` is where the prompt goes on."""

    first: int
    end: int
    num_bytes: int
    is_awaited: bool = False  # a peer may be computing them still
    giver: str = ""


class Computed(NamedTuple):
    """What was computed and is to be stored: hashes of full rows."""

    chain: list[bytes]
    num_seen: int = 0  # rows that were looked at
    # Whether more rows follow: these are of use without a state.
    goes_on: bool = False


class TierRows:
    """The rows of one engine's prompts in its tier."""

    def __init__(self, state: SchedulerState, tier: Tier) -> None:
        self._cache, self._tier = state.cache, tier
        self._num_groups, self._block_size = state.cache.windows.num_groups, state.cache.block_size
        self._states: CarriedStates | None = None
        slots, cache = state.cache.states, state.cache
        if slots is not None:
            self._states = slots.carried = CarriedStates(cache, slots)

    @property
    def has_states(self) -> bool:
        """Whether a load brings a state."""
        return self._states is not None

    def to_load(self, seq: Sequence, num_hit: int) -> Wanted | None:
        """Return what the tier has of ``seq``, whose first ``num_hit`` rows need no computation."""
        chain, kv, size = seq.table.chain, seq.group.request.terms.kv, self._block_size
        if self._states is not None:
            return self._to_load_with_state(self._states, seq, num_hit)
        num_rows = num_there = self._num_rows(chain[num_hit:])
        giver = ""
        if kv is not None:
            giver = kv.engine_id
            if giver:
                num_rows = max(num_rows, min(kv.num_tokens // size, len(chain)) - num_hit)
            if kv.max_load_tokens is not None:
                num_rows = min(num_rows, kv.max_load_tokens // size)
        num_rows = min(num_rows, self._cache.references.num_available // self._num_groups)
        if num_rows <= 0:
            return None
        num_bytes = num_rows * self._num_groups * self._tier.block_bytes
        return Wanted(num_hit, num_hit + num_rows, num_bytes, num_rows > num_there, giver)

    def to_store(self, computed: Computed, num_rows: int) -> tuple[list[bytes], int]:
        """Return the first piece of up to ``num_rows`` rows that the tier lacks, and how many rows it has seen then."""
        chain, states = computed.chain, self._states
        if states is not None and not computed.goes_on:
            ends = (end for end in range(len(chain), 0, -1) if states.is_stored(chain[end - 1]))
            chain = chain[: next(ends, 0)]
        names: list[bytes] = []
        # The row of each name.
        rows: list[int] = []
        for row in range(computed.num_seen, len(chain)):
            names += self._names(chain[row])
            if states is not None and states.is_stored(chain[row]):
                names.append(states.name_of(chain[row]))
            rows += [row] * (len(names) - len(rows))
        num_kept = self._tier.kept(names)
        first = rows[num_kept] if num_kept < len(rows) else len(chain)
        piece = chain[first : first + num_rows]
        return piece, first + len(piece)

    def answer_of(self, seq: Sequence) -> Computed | None:
        """Return what ``seq``, which has ended, leaves for the next turn of its conversation, with recurrent layers."""
        if self._states is None or not seq.table.publishes:
            return None
        chain = list(seq.table.chain)
        extend_chain(chain, seq.table.root, seq.token_ids, self._block_size, seq.table.spans)
        return Computed(chain)

    def _to_load_with_state(self, states: CarriedStates, seq: Sequence, num_hit: int) -> Wanted | None:
        """Return the rows up to the last state that the tier has, if it has those that the tree lacks before it."""
        chain, kv, size = seq.table.chain, seq.group.request.terms.kv, self._block_size
        find, num_known = self._cache.prefix.find, len(seq.token_ids)
        most = min(len(chain), (num_known - 1) // size)
        promised, giver, most_loaded = 0, "", most
        if kv is not None:
            giver = kv.engine_id
            promised = min(kv.num_tokens // size, most) if giver else 0
            most_loaded = most if kv.max_load_tokens is None else kv.max_load_tokens // size
        # First row → where the rows that the tier has from it on end: a long prompt may have many states.
        ends: dict[int, int] = {}
        for end in range(most, num_hit, -1):
            is_there = self._tier.contains([states.name_of(chain[end - 1])]) > 0
            if not is_there and end != promised:
                continue
            first = len(find(chain[:end], num_known, -1).nodes)
            if end - first > most_loaded:
                continue
            if end != promised and first < end:
                if first not in ends:
                    ends[first] = first + self._num_rows(chain[first:end])
                if ends[first] < end:
                    continue
            num_bytes = (end - first) * self._num_groups * self._tier.block_bytes + self._state_bytes
            return Wanted(first, end, num_bytes, not is_there, giver)
        return None

    @property
    def _state_bytes(self) -> int:
        return self._cache.config.state_bytes

    def _num_rows(self, chain: SequenceABC[bytes]) -> int:
        """Return how many leading rows the tier has with the blocks of all groups."""
        names = [name for row in chain for name in self._names(row)]
        return self._tier.contains(names) // self._num_groups

    def _names(self, row: bytes) -> list[bytes]:
        return [group_block_hash(row, group) for group in range(self._num_groups)]
