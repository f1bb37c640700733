"""`Drafts`: tokens that may follow a sequence, as a tree whose root is the last known token. A chain has one path.

    token_ids   a   b   c   d          last known ── a ─┬─ b ── d
    parents    −1   0   0   1                           └─ c

A draft comes behind its parent, so the first n drafts are a tree as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

ROOT = -1  # the last known token, as a parent


@dataclass(frozen=True, slots=True)
class Drafts:
    """``parents[i]`` < i is the draft that draft i follows. Siblings have different tokens."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    def first(self, count: int) -> Drafts:
        """Return the first ``count`` drafts."""
        return self if count == len(self) else Drafts(self.token_ids[:count], self.parents[:count])

    def path(self, node: int) -> list[int]:
        """Return the drafts from the root to ``node``, which is included; for `ROOT` none."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def paths(self) -> list[list[int]]:
        """Cut the tree into paths that go down along first children: each draft is in one of them.

        The first begins at the root; each other one begins behind a draft of an earlier one, or at the root.
        """
        follow: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            follow.setdefault(parent, []).append(node)
        paths, open_heads = [], follow.get(ROOT, [])[::-1]
        while open_heads:
            path = [open_heads.pop()]
            while path[-1] in follow:
                head, *others = follow[path[-1]]
                open_heads += others[::-1]
                path.append(head)
            paths.append(path)
        return paths

    def trunk(self) -> Drafts:
        """Return the first of `paths` as a chain."""
        if self.is_chain:
            return self
        paths = self.paths()
        return chain([self.token_ids[node] for node in paths[0]] if paths else ())

    def along(self, token_ids: Sequence[int]) -> list[int]:
        """Return the drafts from the root whose tokens are ``token_ids``."""
        path: list[int] = []
        node = ROOT
        for draft, parent in enumerate(self.parents):
            if (
                len(path) < len(token_ids)
                and parent == node
                and self.token_ids[draft] == token_ids[len(path)]
            ):
                node = draft
                path.append(draft)
        assert len(path) == len(token_ids)
        return path

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]], limit: int) -> Drafts:
        """Return the tree of paths of token ids from the root: common beginnings are one. At most ``limit`` drafts."""
        known: dict[tuple[int, int], int] = {}  # (parent, token) → draft
        token_ids: list[int] = []
        parents: list[int] = []
        for path in paths:
            node = ROOT
            for token_id in path:
                child = known.get((node, token_id))
                if child is None:
                    if len(token_ids) == limit:
                        break
                    child = known[node, token_id] = len(token_ids)
                    token_ids.append(token_id)
                    parents.append(node)
                node = child
        return cls(tuple(token_ids), tuple(parents))


NO_DRAFTS = Drafts()


def chain(token_ids: Sequence[int]) -> Drafts:
    """Return drafts each of which follows the one before it."""
    return Drafts(tuple(token_ids), tuple(range(ROOT, len(token_ids) - 1)))


class Walk:
    """Moves a state that follows tokens, of which the last can be taken back, between the drafts of a tree."""

    def __init__(
        self, drafts: Drafts, advance: Callable[[int], object], rollback: Callable[[int], None]
    ) -> None:
        self._drafts, self._advance, self._rollback = drafts, advance, rollback
        self.path: list[int] = []  # from the root to where the state is

    def to(self, node: int) -> None:
        """Move to the state behind draft ``node``; `ROOT`: behind the last known token."""
        if node != ROOT and self.path and self._drafts.parents[node] == self.path[-1]:
            target = [*self.path, node]
        else:
            target = self._drafts.path(node)
        self.back_to(target)
        for step in target[len(self.path) :]:
            self._advance(self._drafts.token_ids[step])
            self.path.append(step)

    def back_to(self, target: Sequence[int]) -> None:
        """Take back what is not on the path ``target``."""
        common = 0
        while common < min(len(self.path), len(target)) and self.path[common] == target[common]:
            common += 1
        if common < len(self.path):
            self._rollback(len(self.path) - common)
            del self.path[common:]
