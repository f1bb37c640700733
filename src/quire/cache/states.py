"""`StateSlots`: the slots of recurrent states, by id: which sequence has which, and which hold checkpoints.

A layer with a recurrent state keeps nothing per token but one state per sequence, so a prefix can be taken over only
where a copy of the state was kept: a hit needs the blocks *and* a checkpoint at their end.

    live          the state of a running sequence; a step in flight writes it
    saved         a step in flight writes a checkpoint into it
    checkpoint    belongs to a node of the prefix tree: the state after that node's block; goes with the node
    given up      its sequence stopped while a step that writes it is in flight; free when that step is applied
    loading       a transfer fills it; a checkpoint's then
    free

A checkpoint can be hit once the step that saves it was applied, so no sequence reads what a failed step wrote.
`quire.cache.checkpoint_places` says where checkpoints lie and which go first. `quire.scheduler.policies.states` makes
this with the first scheduler whose model has states.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.cache.blocks import BlockTable, Node
from quire.cache.checkpoint_places import LAST_KINDS, Kind, Place, is_kept, places_of, score
from quire.cache.checkpoints import Checkpoint, Checkpoints, LiveState
from quire.cache.draft_slots import DraftSlots
from quire.cache.prefix_cache import Hit, PrefixCache
from quire.cache.references import References
from quire.config import CacheConfig
from quire.step import StateMove


@dataclass(slots=True, eq=False)
class Save:
    """A checkpoint that a step in flight writes."""

    table: BlockTable
    live: LiveState
    place: Place
    slot: int
    # The hash of its node; None while its tokens are not known.
    block_hash: bytes | None
    is_valid: bool = True


@dataclass(slots=True, eq=False)
class StepSlots:
    """What one step in flight writes for no running sequence."""

    saves: list[Save] = field(default_factory=list)
    given_up: list[int] = field(default_factory=list)
    loaded: list[BlockTable] = field(default_factory=list)  # its moves fill their slots


class StateSlots:
    """The slots of one engine."""

    def __init__(
        self, config: CacheConfig, prefix: PrefixCache, references: References, block_size: int
    ) -> None:
        self.config, self.num_slots = config, config.num_states + config.num_checkpoints
        self.drafts = DraftSlots(range(self.num_slots, self.num_slots + config.num_draft_states))
        self.live: dict[BlockTable, LiveState] = {}
        self.checkpoints = Checkpoints()
        self.steps: dict[int, StepSlots] = {}  # in flight or being planned
        self.free: list[int] = list(range(self.num_slots))[::-1]
        self.num_admitted = self.num_loads = self.num_saves = self.num_evicted = 0
        self._prefix, self._references, self._block_size = prefix, references, block_size
        # The `CarriedStates` of a tier.
        self.carried: Any = None

    @property
    def has_room(self) -> bool:
        """Whether a sequence can have a slot now."""
        return bool(self.free) or len(self.checkpoints) > len(self._held)

    def find(self, chain: Sequence[bytes], num_known: int, step: int) -> Hit:
        """As `PrefixCache.find`: the longest prefix that has its blocks, and a checkpoint at its end."""
        prefix, size = self._prefix, self._block_size
        nodes = prefix.find(chain, num_known, step).nodes
        for num_rows in range(min(len(nodes), (num_known - 1) // size), 0, -1):
            if nodes[num_rows - 1] in self.checkpoints:
                hit = prefix.find(chain[:num_rows], num_known, step)
                if len(hit.nodes) == num_rows:
                    return hit
        return prefix.find((), num_known, step)

    def start(self, table: BlockTable, hit: Hit, num_known: int) -> None:
        """Give the sequence of ``table``, which was admitted with ``hit``, a slot; there is room."""
        self.num_admitted += 1
        checkpoint = None
        if hit.nodes:
            checkpoint = self.checkpoints[hit.nodes[-1]]
            checkpoint.num_hits += 1
            checkpoint.used_at = self.num_admitted
            self.num_loads += 1
        live = self._begin(table, num_known)
        # Where the checkpoint itself had to make room for the sequence, the state is there already.
        if checkpoint is not None and checkpoint.slot != live.slot:
            self._move(table, checkpoint.slot, live.slot)
        size, rows = self._block_size, len(hit.nodes)
        while rows < len(table.chain) and table.chain[rows] in self._prefix.nodes:
            rows += 1
        live.source, live.places = checkpoint, places_of(num_known, hit.num_tokens, rows * size, size)

    def fork(self, source: BlockTable, target: BlockTable, num_tokens: int) -> bool:
        """Copy the state of ``source`` after ``num_tokens`` tokens for ``target``; False: there is no slot."""
        if not self.has_room:
            return False
        slot = self.drafts.source(source, self.live[source].slot)
        self._move(target, slot, self._begin(target, num_tokens + 1).slot)
        return True

    def end(self, table: BlockTable) -> None:
        """The sequence of ``table`` stops running, if it ran: its slot goes once no step in flight writes it."""
        live = self.live.pop(table, None)
        if live is None:
            return
        live.is_running = False
        self.drafts.end(table)
        if self._references.in_flight(table):
            self._step(table.last_step).given_up.append(live.slot)
        else:
            self.free.append(live.slot)

    def plan_drafts(self, table: BlockTable, num_known: int, num_drafts: int) -> list[tuple[int, int]]:
        """Let the state of ``table`` go on from what was accepted of its last drafts.

        Returns where the chunk that is planned, of ``num_known`` tokens and then drafts, keeps states to go back to.
        """
        slot = self.drafts.take(table)
        if slot is not None:
            self._move(table, slot, self.live[table].slot)
        if not num_drafts:
            return []
        return self.drafts.place(self._references.planning.step, table, num_known, num_drafts)

    def plan_saves(
        self, table: BlockTable, start: int, end: int, num_drafts: int = 0, *, rolls: bool
    ) -> tuple[tuple[int, int], ...]:
        """Return the checkpoints of a chunk of ``table`` that is planned, as of `SeqPlan.checkpoints`.

        The last ``num_drafts`` tokens up to ``end`` are drafts. ``rolls``: its answer has a checkpoint, too.
        """
        size, live = self._block_size, self.live[table]
        edge = (end - num_drafts) // size * size
        if edge <= start:
            edge = end // size * size
        if edge <= start:
            return ()
        places = [place for place in live.places if place.num_tokens <= end]
        if places:
            live.places = [place for place in live.places if place.num_tokens > end]
        if rolls and edge > live.num_known:
            places.append(Place(edge, Kind.ANSWER))
        if not (places and table.publishable and self.config.num_checkpoints):
            return ()
        saves = []
        for place in sorted(places, key=lambda place: (-place.kind.value, -place.num_tokens)):
            block_hash = table.chain[place.num_tokens // size - 1 : place.num_tokens // size]
            node = self._prefix.nodes.get(block_hash[0]) if block_hash else None
            known = None if node is None else self.checkpoints.get(node)
            if known is not None:
                self._use_again(known, place.kind)
            elif self.free or self.evict(score(place.kind, 0, 0, place.num_saved)):
                slot = self.free.pop()
                saves.append(Save(table, live, place, slot, block_hash[0] if block_hash else None))
        if saves:
            self._step(self._references.planning.step).saves += saves
        return tuple(sorted((save.place.num_tokens - start, save.slot) for save in saves))

    def close(self, step: int) -> None:
        """``step`` was applied: what it saved can be hit from now on.

        A state behind a draft that was rejected has no node, since its block is not full of known tokens.
        """
        record = self.steps.pop(step, None)
        if record is None:
            return
        self.free += record.given_up
        for save in record.saves:
            node = self._node(save) if save.is_valid else None
            known = None if node is None else self.checkpoints.get(node)
            if known is not None:
                self._use_again(known, save.place.kind)
            if node is None or known is not None:
                self.free.append(save.slot)
                continue
            self.num_saves += 1
            self.checkpoints.add(node, Checkpoint(save.slot, *save.place[:2], self.num_admitted, save.live))
            if save.place.kind in LAST_KINDS:
                self._supersede(save.live)
            if save.place.kind is Kind.ANSWER:
                self._roll(save.live, node)

    def distrust(self, tables: Iterable[BlockTable]) -> None:
        """What steps in flight save of ``tables`` is wrong."""
        wrong = set(tables)
        for record in self.steps.values():
            for save in record.saves:
                save.is_valid = save.is_valid and save.table not in wrong

    def fail(self, step: int) -> None:
        """The whole ``step`` failed: its moves may not have taken place, and nothing that it saved is to be used."""
        record = self.steps.get(step)
        if record is None:
            return
        for table in record.loaded:
            table.reads.add(step)
        for save in record.saves:
            save.is_valid = False
        self.close(step)
        self.drafts.close(step, {})

    def forget(self, prefix: PrefixCache, references: References) -> None:
        """Nothing runs, and the prefix tree and the references begin anew: all slots are free."""
        assert not self.live
        self._prefix, self._references = prefix, references
        self.checkpoints.clear()
        self.steps.clear()
        self.drafts.clear()
        self.free = list(range(self.num_slots))[::-1]

    def sweep(self) -> bool:
        """Free the checkpoints of nodes that left the tree; tell whether there were some."""
        gone = [node for node in self.checkpoints if not self._prefix.has(node)]
        for node in gone:
            self._give_back(self.checkpoints.pop(node).slot)
        return bool(gone)

    def evict(self, worth: float) -> bool:
        """Free the checkpoint that is least likely used again, if that is no more than ``worth``."""
        if self.sweep() and self.free:
            return True
        least = self.checkpoints.least_likely(self.num_admitted, self._held)
        if least is None or least[1] > worth:
            return False
        self.free.append(self.checkpoints.remove(least[0]))
        self.num_evicted += 1
        return True

    def _give_back(self, slot: int) -> None:
        """The checkpoint in ``slot`` has gone: the slot is free, at the latest when a store has read it."""
        if self.carried is not None and slot in self._held:
            self.carried.orphans.append(slot)
        else:
            self.free.append(slot)

    @property
    def _held(self) -> set[int]:
        """Slots that stores read."""
        return set() if self.carried is None else self.carried.stored_slots

    def _begin(self, table: BlockTable, num_known: int) -> LiveState:
        if not self.free:
            self.evict(math.inf)
        assert table not in self.live
        live = self.live[table] = LiveState(self.free.pop(), num_known)
        return live

    def _move(self, table: BlockTable, source: int, target: int) -> None:
        """Fill the slot ``target`` of ``table`` in the step that is planned."""
        planning = self._references.planning
        planning.state_moves.append(StateMove(source, target))
        self._step(planning.step).loaded.append(table)

    def _step(self, step: int) -> StepSlots:
        return self.steps.setdefault(step, StepSlots())

    def _use_again(self, checkpoint: Checkpoint, kind: Kind) -> None:
        """Another sequence would have saved the same."""
        checkpoint.used_at = self.num_admitted
        checkpoint.kind = max(checkpoint.kind, kind, key=lambda kind: kind.value)

    def _roll(self, live: LiveState, node: Node) -> None:
        """The answer of a sequence has a checkpoint further on: few of those before it are kept."""
        before = None if live.tail is None else self.checkpoints.get(live.tail)
        if live.tail is not None and before is not None and not before.num_hits and before.owner is live:
            if is_kept(before.num_tokens, live.num_known, self._block_size):
                before.kind = Kind.INSIDE
            else:
                self._give_back(self.checkpoints.remove(live.tail))
        live.tail = node

    def _supersede(self, live: LiveState) -> None:
        """The conversation of ``live`` has gone on: the ends of the turn that it began from are ends no more."""
        source, live.source = live.source, None
        if source is None:
            return
        for checkpoint in self.checkpoints.values():
            if checkpoint.owner is source.owner and checkpoint.kind in LAST_KINDS:
                checkpoint.kind = Kind.BRANCH if checkpoint.num_hits > 1 else Kind.BACKWARD

    def _node(self, save: Save) -> Node | None:
        """The node that ``save`` belongs to, if the tree has it."""
        block_hash, row = save.block_hash, save.place.num_tokens // self._block_size - 1
        if block_hash is None and row < len(save.table.chain):
            block_hash = save.table.chain[row]
        return None if block_hash is None else self._prefix.nodes.get(block_hash)
