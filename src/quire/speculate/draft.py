"""`DraftProposer`: a smaller model decodes ahead, and the target verifies what it sampled (Leviathan et al. 2023).

The draft model samples with the noise of the target, so that a draft is accepted at any temperature where the two
distributions are close enough. Its forward pass is a `DraftForward`, which the runner supplies. A step of the engine:

    known tokens of a sequence          │ drafts
    … computed │ to catch up …… last     │ d0 │ d1 │ d2
                 one chunk, samples d0     then one row per draft but the last

Sequences far behind (a long prompt) catch up over several steps, and have drafts once they have.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.sampling.draft_tree import NO_DRAFTS, ROOT, Drafts, chain
from quire.speculate.proposer import Wanted


class Rows(NamedTuple):
    """The tokens at ``start`` … ``end`` − 1 of a sequence."""

    seq_id: int
    start: int
    end: int


class DraftForward(Protocol):
    """The draft model with its KV cache. A draft that is appended counts as a token until it is taken back."""

    max_tokens: int  # per sequence
    max_rows: int  # per forward pass

    def num_computed(self, seq_id: int, num_known: int, num_agreed: int) -> int:
        """Return how many leading tokens have K and V, without a gap: of ``num_known`` tokens known before, and behind
        them of the drafts computed then that were right, up to token ``num_agreed``.
        """
        ...

    def claim(self, seq_id: int, start: int, end: int, claimed: set[int]) -> int:
        """Add the blocks of the tokens ``start`` … ``end`` − 1 to ``claimed``, up to the first that was there; return
        the end of those added. One sequence alone may fill a shared block: its first position clears the others.
        """
        ...

    def forward(self, rows: Sequence[Rows]) -> list[int]:
        """Compute ``rows``, whose predecessors have K and V; return what is sampled behind each sequence's last token.

        For a sequence whose rows end before its last token, the value has no meaning.
        """
        ...

    def chains(self, rows: Sequence[Rows], counts: Sequence[int]) -> list[list[int]] | None:
        """Compute ``rows``, which reach each sequence's last token, and go on to ``counts`` ≥ 1 drafts of each.

        No draft counts as a token afterwards. None: nothing was computed, since these take a step per draft.
        """
        ...

    def second(self, seq_ids: Container[int]) -> dict[int, int]:
        """Return what the last `forward` would have sampled for ``seq_ids``, had its token been forbidden.

        A sequence without another token is left out.
        """
        ...

    def append(self, seq_id: int, token_id: int) -> None:
        """Put a draft behind the last token of a sequence."""
        ...

    def take_back(self, seq_id: int, num_drafts: int) -> None:
        """Take back as many appended drafts."""
        ...


UNKNOWN = 1 << 62  # more tokens than any sequence has


@dataclass(slots=True)
class DraftState:
    """What the draft model computed last of a sequence."""

    num_known: int = UNKNOWN  # tokens that were known then
    drafts: tuple[int, ...] = ()  # computed behind them


class Growing:
    """The drafts of a sequence while they are made: a chain, and tokens beside its first ones."""

    def __init__(self, wanted: Wanted, limit: int) -> None:
        self._left, self._beside = limit, wanted.max_paths - 1
        self.trunk: list[int] = []
        self._last = ROOT
        self._token_ids: list[int] = []
        self._parents: list[int] = []

    @property
    def is_full(self) -> bool:
        return self._left <= 0

    @property
    def takes_second(self) -> bool:
        return self._beside > 0 and self._left > 1

    def add(self, token_id: int, second: int | None) -> None:
        """Append ``token_id`` to the chain, and put ``second`` beside it."""
        parent, self._last = self._last, len(self._token_ids)
        self.trunk.append(token_id)
        for token in (token_id,) if second is None else (token_id, second):
            self._token_ids.append(token)
            self._parents.append(parent)
            self._left -= 1
        self._beside -= second is not None

    def drafts(self) -> Drafts:
        return Drafts(tuple(self._token_ids), tuple(self._parents))


class DraftProposer:
    """Drafts with another model."""

    def __init__(self, model: DraftForward) -> None:
        self._model = model

    def begin(self) -> DraftState:
        """As `Proposer.begin`."""
        return DraftState()

    def propose(self, wanted: list[Wanted]) -> list[Drafts]:
        """As `Proposer.propose`."""
        limits = [self._limit(seq) for seq in wanted]
        chunks = self._catch_up(wanted, limits)
        chains = self._chains(wanted, limits, chunks)
        if chains is not None:
            return chains
        drafts = {seq.seq_id: Growing(seq, limit) for seq, limit in zip(wanted, limits, strict=True)}
        appended = dict.fromkeys(drafts, 0)
        try:
            self._decode(wanted, chunks, drafts, appended)
        finally:
            for seq_id, count in appended.items():
                if count:
                    self._model.take_back(seq_id, count)
        for seq in wanted:
            seq.state.drafts = tuple(drafts[seq.seq_id].trunk[:-1])
        return [drafts[seq.seq_id].drafts() for seq in wanted]

    def _chains(
        self, wanted: list[Wanted], limits: Sequence[int], chunks: Sequence[Rows]
    ) -> list[Drafts] | None:
        """Return chains computed in one call, where all sequences are ready for theirs; else None."""
        ready = [seq for seq, limit in zip(wanted, limits, strict=True) if limit > 0]
        if not ready or len(chunks) < len(ready):
            return None
        for seq, rows in zip(ready, chunks, strict=True):
            if rows.end < len(seq.token_ids) or (seq.max_paths > 1 and seq.limit > 1):
                return None
        chains = self._model.chains(chunks, [limit for limit in limits if limit > 0])
        if chains is None:
            return None
        drafts = dict.fromkeys((seq.seq_id for seq in wanted), NO_DRAFTS)
        for seq, token_ids in zip(ready, chains, strict=True):
            seq.state.drafts = tuple(token_ids[:-1])
            drafts[seq.seq_id] = chain(token_ids)
        return list(drafts.values())

    def _decode(
        self, wanted: list[Wanted], chunks: Sequence[Rows], drafts: dict[int, Growing], appended: dict[int, int]
    ) -> None:  # fmt: skip
        """Fill ``drafts``; ``appended`` counts those that are behind a sequence's last token at the moment."""
        last = {rows.seq_id: rows.end for rows in chunks}
        ready = [seq for seq in wanted if last.get(seq.seq_id) == len(seq.token_ids)]
        sampled = self._forward(chunks)
        while ready:
            others: dict[int, int] = {}
            if branching := {seq.seq_id for seq in ready if drafts[seq.seq_id].takes_second}:
                others = self._model.second(branching)
            computed: list[Rows] = []
            for seq in ready:
                own, seq_id = drafts[seq.seq_id], seq.seq_id
                own.add(sampled[seq_id], others.get(seq_id))
                if not own.is_full:
                    self._model.append(seq_id, sampled[seq_id])
                    appended[seq_id] += 1
                    end = len(seq.token_ids) + appended[seq_id]
                    computed.append(Rows(seq_id, end - 1, end))
            ready = [seq for seq in ready if not drafts[seq.seq_id].is_full]
            sampled = self._forward(computed)

    def _forward(self, rows: Sequence[Rows]) -> dict[int, int]:
        """Return what is sampled behind each sequence's rows."""
        sampled = self._model.forward(rows) if rows else []
        return {seq.seq_id: token_id for seq, token_id in zip(rows, sampled, strict=True)}

    def _limit(self, wanted: Wanted) -> int:
        return min(wanted.limit, self._model.max_tokens - len(wanted.token_ids))

    def _catch_up(self, wanted: list[Wanted], limits: Sequence[int]) -> list[Rows]:
        """Return the rows that the draft model has not computed, as many sequences as fit a forward pass.

        A sequence waits where another one fills its next block.
        """
        left, chunks, claimed = self._model.max_rows, [], set[int]()
        for seq, limit in zip(wanted, limits, strict=True):
            state: DraftState = seq.state
            end = len(seq.token_ids)
            start = self._start(seq)
            state.num_known, state.drafts = end, ()
            stop = min(end, start + left)
            if limit > 0 and (stop := self._model.claim(seq.seq_id, start, stop, claimed)) > start:
                chunks.append(Rows(seq.seq_id, start, stop))
                left -= stop - start
        return chunks

    def _start(self, wanted: Wanted) -> int:
        """Return the first token to compute: behind the tokens known last time, and the drafts that were right."""
        state: DraftState = wanted.state
        end = len(wanted.token_ids)
        num_known = min(state.num_known, end - 1)
        agreed = num_known
        for draft, token_id in zip(state.drafts, wanted.token_ids[num_known:].tolist(), strict=False):
            if draft != token_id:
                break
            agreed += 1
        return self._model.num_computed(wanted.seq_id, num_known, min(agreed, end - 1))
