"""`PrefixCache`: a tree of full blocks, found by chain hash, evicted leaves first.

A node is one block of tokens after a certain prefix. It holds one block id per cache group, or `NO_BLOCK`: a sliding
group forgets the blocks that no future query can see, so an inner node may have blocks of the full groups only.

                 ┌ node(0…15) ─ node(16…31) ─ node(32…47)        group 0 (full)     7   3   9
    root ────────┤                                               group 1 (window)   –   –   4
                 └ node(0…15)'                                   a hit of 3 rows is possible, one of 2 is not

Idle blocks (their only reference is the cache's) can always be had back: a sequence that holds a full-group block of
a node holds those of all its ancestors, so idle nodes form whole subtrees and are evicted leaf by leaf, least recently
used first; an idle block of a sliding group can be taken out of its node at any time. Hence free + idle = available.

Blocks are named by chain hashes, the same in every process and on every machine:

    root     = H("quire.root.v1",  model_key, adapter, cache_salt, block_size)
    block i  = H("quire.block.v2", hash of block i − 1 (or root), the token ids of block i, its part of each span)
    page     = H("quire.page.v1",  hash of block i, index of the cache group)

H is BLAKE2b-256 over typed fields: each is written as a tag, its length and its bytes, so that no two different
lists of fields ever give the same input. A hash names everything that K and V of a block depend on: what computes
it (model, dtype, quantization, adapter content), which requests may share it (salt), and every token up to its end. A
token id is four bytes: with 16 of them, a block is one round of BLAKE2b's compression.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from quire.cache.blocks import NO_BLOCK, BlockPool, Node, Spans, Windows
from quire.cache.events import BlockRemoved, BlockStored, EventBuffer

HASH_BYTES = 32
SLICE = 500  # nodes taken apart per step: about half a millisecond
_TOKEN_BYTES = 4
_ROOT, _PAGE = b"quire.root.v1", b"quire.page.v1"  # `person` of BLAKE2b: at most 16 bytes
_BLOCK = blake2b(digest_size=HASH_BYTES, person=b"quire.block.v2")  # copied, which is quicker than begun anew


def root_hash(model_key: str, block_size: int, *, adapter: str = "", cache_salt: str = "") -> bytes:
    """Return the hash that all chains of one namespace start from."""
    fields = _text(model_key) + _text(adapter) + _text(cache_salt) + _integer(block_size)
    return blake2b(fields, digest_size=HASH_BYTES, person=_ROOT).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block whose predecessor (or root) has the hash ``parent``."""
    assert len(parent) == HASH_BYTES
    chain: list[bytes] = []
    extend_chain(chain, parent, token_ids, len(token_ids))
    return chain[0]


def group_block_hash(block: bytes, group: int) -> bytes:
    """Return the name of a block's K and V of one cache group, for tiers and transfers."""
    return blake2b(block + _integer(group), digest_size=HASH_BYTES, person=_PAGE).digest()


def extend_chain(
    chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, spans: Spans = None
) -> None:
    """Append to ``chain`` the hashes of the full blocks of ``token_ids`` that it lacks; ``spans``: of the table."""
    num_blocks = len(token_ids) // block_size
    if num_blocks <= len(chain):
        return
    parent = chain[-1] if chain else root
    data = _token_bytes(token_ids[len(chain) * block_size : num_blocks * block_size])
    width = block_size * _TOKEN_BYTES
    begin, add = _BLOCK.copy, chain.append
    for start in range(0, len(data), width):
        state = begin()
        state.update(parent + data[start : start + width])
        if spans:
            state.update(spans.get(len(chain), b""))
        parent = state.digest()
        add(parent)


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """Four bytes a token, little-endian."""
    words = array("I", token_ids)
    assert words.itemsize == _TOKEN_BYTES
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    return b"s" + struct.pack("<Q", len(data)) + data


def _integer(value: int) -> bytes:
    return b"i" + struct.pack("<Q", value)


class Hit(NamedTuple):
    """What of a chain can be used: ``nodes`` from the root down, and where the computation goes on."""

    nodes: list[Node]
    num_tokens: int  # already computed; at least one known token is left
    first_rows: tuple[int, ...]  # per group: the first row whose block is needed
    copy_tail: bool  # last block partly used: copy it, write into the copy

    def num_idle(self, ref_counts: Sequence[int]) -> int:
        """Return how many of the blocks that the hit takes count as available now."""
        return sum(
            ref_counts[node.block_ids[group]] == 1
            for group, first in enumerate(self.first_rows)
            for node in self.nodes[first:]
        )


class PrefixCache:
    """Finds, keeps and evicts published blocks of ``pool``."""

    def __init__(
        self, pool: BlockPool, block_size: int, windows: Windows, events: EventBuffer | None = None
    ) -> None:
        self.pool = pool
        self.nodes: dict[bytes, Node] = {}
        self.node_of: list[Node | None] = [None] * pool.num_blocks  # indexed by block id
        self.num_idle = 0  # blocks that only the tree refers to
        self.num_blocks = 0  # blocks in the tree
        self.num_evicted = 0  # blocks, since the start
        self.events = events
        self.windows = windows
        self._block_size = block_size
        self._idle = IdleQueue()
        self.cleared: list[dict[bytes, Node]] = []  # dropped by `clear`, not yet taken apart
        self._strippable: dict[int, None] = {}  # idle blocks of sliding groups, least recently used first

    def find(self, chain: Sequence[bytes], num_known: int, step: int) -> Hit:
        """Return the longest usable prefix of a chain of hashes of a sequence with ``num_known`` tokens.

        The last known token is always left to compute. ``step`` is being planned: its own blocks may be read but
        not copied, since moves take effect before the forward pass writes them.
        """
        nodes: list[Node] = []
        for block_hash in chain:
            node = self.nodes.get(block_hash)
            if node is None:
                break
            nodes.append(node)
        rows = len(nodes)
        assert rows * self._block_size <= num_known
        if rows and rows * self._block_size == num_known and nodes[-1].step == step:
            rows -= 1
        rows, first_rows = self.windows.usable(nodes, rows, num_known)
        num_tokens = min(rows * self._block_size, num_known - 1)
        return Hit(nodes[:rows], num_tokens, first_rows, num_tokens < rows * self._block_size)

    def insert(
        self,
        block_hash: bytes,
        parent: Node | None,
        parent_hash: bytes,
        block_ids: tuple[int, ...],
        step: int,
        token_ids: Sequence[int],
    ) -> Node:
        """Publish a block that a sequence holds (`NO_BLOCK` where it does not) and take references for the tree."""
        assert block_hash not in self.nodes
        node = Node(block_hash, parent, parent_hash, block_ids, step)
        self.nodes[block_hash] = node
        if parent is not None:
            assert parent.alive
            node.link()
        for block_id in block_ids:
            if block_id != NO_BLOCK:
                self._adopt(node, block_id)
        assert node.num_used > 0
        if self.events is not None:
            if self.events.with_tokens:
                node.token_ids = tuple(token_ids)
            self.events.add(BlockStored(block_hash, parent_hash, node.token_ids, node.groups))
        return node

    def fill(self, node: Node, group: int, block_id: int) -> None:
        """Give ``node`` the block of a sliding group that it lacked."""
        assert node.block_ids[group] == NO_BLOCK
        node.put(group, block_id)
        self._adopt(node, block_id)
        if self.events is not None:
            self.events.add(BlockStored(node.block_hash, node.parent_hash, node.token_ids, (group,)))

    def mark_used(self, block_id: int) -> None:
        """An idle block of the tree got another reference."""
        node = self.node_of[block_id]
        assert node is not None
        node.num_used += 1
        self.num_idle -= 1
        if self._strippable:
            self._strippable.pop(block_id, None)

    def mark_idle(self, block_ids: Iterable[int]) -> None:
        """Blocks have one reference left: those of the tree, where it is the tree's own, are idle now."""
        node_of, sliding = self.node_of, self.windows.sliding
        num_nodes = len(self.nodes) + sum(map(len, self.cleared))
        for block_id in block_ids:
            node = node_of[block_id]
            if node is None:
                continue
            node.num_used -= 1
            self.num_idle += 1
            if node.num_used == 0:
                self._idle.add(node, num_nodes)
            if sliding and self.windows.windows[node.block_ids.index(block_id)] is not None:
                self._strippable[block_id] = None

    def evict(self, num_blocks: int) -> None:
        """Free at least ``num_blocks`` idle blocks: leaves, least recently used first, then sliding blocks inside."""
        assert num_blocks <= self.num_idle
        before, target = self.num_blocks, self.pool.num_free + num_blocks
        if not self.windows.sliding:
            self._evict_leaves(num_blocks)
        while self.pool.num_free < target:
            node = self._idle.pop()
            if node is not None:
                self._remove(node)
            else:
                self._strip(next(iter(self._strippable)))
        self.num_evicted += before - self.num_blocks

    def withdraw(self, nodes: Iterable[Node]) -> None:
        """Remove nodes and everything below them; blocks in use stay with their users."""
        for top in nodes:
            if not self.has(top):
                continue
            subtree = [top]
            for node in subtree:  # grows: parents before children
                child = node.first_child
                while child is not None:
                    subtree.append(child)
                    child = child.next_sibling
            for node in reversed(subtree):
                if node.alive:  # a parent left without blocks went with its last child
                    self._remove(node)

    def clear(self) -> int:
        """Forget every published block; return how many can be had again: those in use stay with their users.

        No chain finds the nodes any more. Their blocks are given up in slices, or evicted where needed sooner.
        """
        num_idle = self.num_idle
        if self.events is not None:
            self.events.forget()
        self.cleared.append(self.nodes)
        self.nodes = {}
        self.take_apart()
        return num_idle

    def take_apart(self) -> bool:
        """Remove up to `SLICE` nodes that `clear` forgot, children before parents; tell whether some are left."""
        for _ in range(SLICE if self.cleared else 0):
            if not self.cleared[-1]:
                self.cleared.pop()
                break
            _, node = self.cleared[-1].popitem()
            if node.alive:
                self._remove(node)
        return bool(self.cleared)

    def has(self, node: Node) -> bool:
        """Whether chains find ``node``: it is alive, and not of before a `clear`."""
        return node.alive and (not self.cleared or self.nodes.get(node.block_hash) is node)

    def snapshot(self) -> Iterator[BlockStored]:
        """Yield every block as a `BlockStored`, parents first, for a reader that lost events."""
        for node in self.nodes.values():  # in order of insertion
            yield BlockStored(node.block_hash, node.parent_hash, node.token_ids, node.groups)

    def _adopt(self, node: Node, block_id: int) -> None:
        assert self.node_of[block_id] is None
        self.node_of[block_id] = node
        self.pool.share(block_id)
        node.num_used += 1
        self.num_blocks += 1

    def _evict_leaves(self, num_blocks: int) -> None:
        """`evict` where no group slides: every node has all its blocks, and those of an idle leaf are unused."""
        node_of, pop = self.node_of, self._idle.pop
        block_ids: list[int] = []
        while len(block_ids) < num_blocks:
            node = pop()
            assert node is not None
            self._forget(node)
            node.unlink()
            block_ids += node.block_ids
        for block_id in block_ids:
            node_of[block_id] = None
        self.pool.drop_all(block_ids)
        self.num_blocks -= len(block_ids)
        self.num_idle -= len(block_ids)

    def _forget(self, node: Node) -> None:
        """Chains find ``node``, which is alive, no longer."""
        if self.has(node):
            del self.nodes[node.block_hash]
            if self.events is not None and node.has_blocks:
                self.events.add(BlockRemoved(node.block_hash, node.groups))
        node.alive = False

    def _disown(self, node: Node, block_id: int) -> None:
        """Give up the tree's reference to a block of ``node``."""
        self.node_of[block_id] = None
        if self._strippable:
            self._strippable.pop(block_id, None)
        self.num_blocks -= 1
        if self.pool.drop(block_id) == 0:
            self.num_idle -= 1
        else:
            node.num_used -= 1

    def _strip(self, block_id: int) -> None:
        """Take the idle block of a sliding group out of its node."""
        node = self.node_of[block_id]
        assert node is not None
        group = node.block_ids.index(block_id)
        node.put(group, NO_BLOCK)
        self._disown(node, block_id)
        if self.events is not None and self.has(node):
            self.events.add(BlockRemoved(node.block_hash, (group,)))
        if node.first_child is None and not node.has_blocks:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        """Take a leaf out of the tree, and its ancestors that are left with neither blocks nor children."""
        while True:
            assert node.first_child is None
            self._forget(node)
            for block_id in node.block_ids:
                if block_id != NO_BLOCK:
                    self._disown(node, block_id)
            node.unlink()
            parent = node.parent
            if parent is None or parent.first_child is not None or not self.windows.sliding:
                return
            if parent.has_blocks:
                if not parent.num_used:
                    self._idle.lost_children(parent)
                return
            node = parent


class IdleQueue:
    """Nodes in the order in which they became idle (`num_used` 0): the least recently used first.

    A node that is used again keeps its place, which means nothing: of several places of a node the last one counts.
    A sequence that uses a node uses its ancestors, and gives them up after it, so with a cache group that keeps every
    row a node comes before its parent, and the first that is idle is a leaf. Where all groups slide it may have
    children: then it loses its place, until the last of them goes.
    """

    def __init__(self) -> None:
        self.swept: deque[Node] = deque()  # places that counted at a sweep; older than `entries`
        self.entries: deque[Node] = deque()

    def add(self, node: Node, num_nodes: int) -> None:
        """``node`` became idle. ``num_nodes`` (in the tree) tells when it pays to sweep."""
        node.num_places += 1
        self.entries.append(node)
        if self.swept or len(self.entries) > 2 * num_nodes + 64:
            self._sweep()

    def lost_children(self, node: Node) -> None:
        """The last child of an idle node went; if it lost its place before, no other was idle for longer."""
        if node.num_places == 0:
            node.num_places = 1
            (self.swept or self.entries).appendleft(node)

    def pop(self) -> Node | None:
        """Take out and return the leaf that was idle for the longest time, or None."""
        while places := self.swept or self.entries:
            node = places.popleft()
            if self._counts(node) and node.first_child is None:
                return node
        return None

    def _sweep(self) -> None:
        """Drop places that do not count, eight at a time, so that no step waits for all of them."""
        for _ in range(8):
            if not self.entries:
                self.entries, self.swept = self.swept, self.entries
                return
            node = self.entries.popleft()
            if self._counts(node):
                node.num_places = 1
                self.swept.append(node)

    def _counts(self, node: Node) -> bool:
        """Take a place of ``node`` away; tell whether it counted."""
        node.num_places -= 1
        return node.num_places == 0 and node.alive and not node.num_used
