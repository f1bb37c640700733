"""`verify`: the one place where rows of logits become tokens of sequences.

A sequence has one row for its last known token and one for each draft that the step verifies:

    row       last known   draft 0   draft 1   draft 2
    samples   a            b         c         ·             accepted: draft 0 = a, draft 1 = b, draft 2 ≠ c
    result    a, b, c                                        the accepted drafts and the one token that follows them

Each row is sampled with the noise of its own position and with the state after the drafts before it, so the tokens are
those of plain decoding at any temperature, and without drafts this is plain sampling. In a tree a row's drafts are the
children of its own: what the row samples leads to the child that equals it, as far as there is one. With another rule
of acceptance (`quire.sampling.accept`) the sampler looks at the drafts of a row, and returns one where it accepts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.runner.sequences import WorkerSeq, WorkerSeqs
from quire.sampling.accept import Draft
from quire.sampling.draft_tree import ROOT, Drafts, Walk
from quire.sampling.sampler import ALL_FORBIDDEN, NOT_FINITE, Columns, Sampler, SeqSample

if TYPE_CHECKING:
    from quire.sampling.grammars import GrammarState


def verify(
    logits: Tensor, table: WorkerSeqs, seqs: Sequence[WorkerSeq], columns: Columns, sampler: Sampler
) -> list[SeqSample]:
    """Return what each of ``seqs`` got, and advance its state; what follows a rejected draft is taken back.

    ``logits: [num_logits, vocab] float32`` and ``columns [num_logits]`` have the rows of each sequence in order. A
    sequence whose first row holds a NaN, or whose every id is forbidden there, gets an error and does not advance.
    Where that happens after accepted drafts, its next step meets it at the same position.
    """
    assert logits.shape[0] == columns.size
    if not seqs:
        return []
    firsts = list(accumulate((1 + len(seq.verifying) for seq in seqs), initial=0))  # [num_seqs + 1]
    barred: dict[int, set[int]] = {}  # by place in seqs: drafts that may not be accepted
    errors: dict[int, str] = {}
    for place, seq in enumerate(seqs):
        if seq.grammar is not None:
            barred[place] = seq.grammar.apply(logits[firsts[place] : firsts[place + 1]], seq.verifying)
            if seq.grammar.error is not None:
                errors[place] = seq.grammar.error
    drafts = _drafts(seqs, firsts) if sampler.accept != "exact" else None
    walks = _walks(seqs)
    ids, best = sampler.sample(logits, columns, _editor(seqs, firsts, walks, errors), drafts)
    if not all(map(isfinite, best.tolist())):
        _note_failures(logits, ~np.isfinite(best), firsts, barred, errors)
    token_ids: list[int] = ids.tolist()
    kept: list[list[int]] = []  # rows
    tried: dict[int, int] = {}
    followed: list[tuple[GrammarState, int]] = []
    for place, seq in enumerate(seqs):
        first = firsts[place]
        path: list[int] = []
        if seq.verifying:
            path = follow(seq.verifying, token_ids[first : firsts[place + 1]], barred.get(place, set()))
            if seq.branches or not seq.num_beside:  # else the tree was cut to its trunk
                seq.sampled = tuple(token_ids[first : firsts[place + 1]])
            tried[place] = len(path) + ((path[-1] if path else ROOT) in seq.verifying.parents)
            table.accept(seq, path)
        kept.append([] if place in errors else [first, *[first + 1 + node for node in path]])
        if place not in errors and seq.processors is not None:
            try:
                if place in walks:
                    walks[place].to(path[-1] if path else ROOT)
                seq.processors.advance(token_ids[kept[-1][-1]])
            except Exception as error:
                errors[place], kept[-1] = _fault(error), []
        if place not in errors and seq.grammar is not None:
            followed.append((seq.grammar, token_ids[kept[-1][-1]]))
    if followed:
        followed[0][0].grammars.follow(followed)
    found = sampler.logprobs(logits, columns, [row for rows in kept for row in rows], token_ids)
    return [
        SeqSample(
            tuple([token_ids[row] for row in rows]),
            tuple([found[row] for row in rows]) if rows and rows[0] in found else None,
            errors.get(place),
            tried.get(place, 0),
        )
        for place, rows in enumerate(kept)
    ]


def follow(drafts: Drafts, sampled: Sequence[int], barred: set[int]) -> list[int]:
    """Return the accepted drafts; ``sampled[0]`` leads to one at the root, ``sampled[1 + i]`` to one behind draft i."""
    path: list[int] = []
    node = ROOT
    for draft, (token_id, parent) in enumerate(zip(drafts.token_ids, drafts.parents, strict=True)):
        if parent == node and token_id == sampled[1 + node] and draft not in barred:
            node = draft
            path.append(draft)
    return path


def _walks(seqs: Sequence[WorkerSeq]) -> dict[int, Walk]:
    """Return what moves the logits processors of a sequence along its drafts, by place."""
    return {
        place: Walk(seq.verifying, seq.processors.advance, seq.processors.rollback)
        for place, seq in enumerate(seqs)
        if seq.processors is not None and seq.verifying
    }


def _editor(
    seqs: Sequence[WorkerSeq], firsts: Sequence[int], walks: dict[int, Walk], errors: dict[int, str]
) -> Callable[[int, Tensor], None] | None:
    """Return what applies the logits processors to a row, in their state behind the row's draft; None: there are none.

    An exception in one is an entry of ``errors`` at the place of its sequence.
    """
    of: dict[int, tuple[int, int]] = {}
    for place, (first, seq) in enumerate(zip(firsts, seqs, strict=False)):
        if seq.processors is not None:
            for node in range(ROOT, len(seq.verifying)):
                of[first + 1 + node] = place, node
    if not of:
        return None

    def edit(row: int, logits: Tensor) -> None:
        place, node = of[row]
        processors = seqs[place].processors
        assert processors is not None
        try:
            if node != ROOT:
                walks[place].to(node)
            processors.apply(logits)
        except Exception as error:
            errors.setdefault(place, _fault(error))

    return edit


def _drafts(seqs: Sequence[WorkerSeq], firsts: Sequence[int]) -> dict[int, list[Draft]]:
    """Return the drafts that may follow each row, by row."""
    found: dict[int, list[Draft]] = {}
    for first, seq in zip(firsts, seqs, strict=False):
        for node, (token_id, parent) in enumerate(
            zip(seq.verifying.token_ids, seq.verifying.parents, strict=True)
        ):
            draft = Draft(token_id, seq.draft_probs[node] if seq.draft_probs else None)
            found.setdefault(first + 1 + parent, []).append(draft)
    return found


def _fault(error: Exception) -> str:
    return f"a logits processor failed: {type(error).__name__}: {error}"


def _note_failures(
    logits: Tensor, failed: np.ndarray[tuple[int], np.dtype[np.bool_]], firsts: Sequence[int],
    barred: dict[int, set[int]], errors: dict[int, str],
) -> None:  # fmt: skip
    """A first row that ``failed`` is an error; the draft of a later one may not be accepted."""
    ends = np.asarray(firsts)
    for row in np.flatnonzero(failed).tolist():
        place = int(np.searchsorted(ends, row, side="right")) - 1
        if row > firsts[place]:
            barred.setdefault(place, set()).add(row - firsts[place] - 1)
        elif place not in errors:
            raw_is_fine = bool(torch.isfinite(logits[row].amax()))
            errors[place] = ALL_FORBIDDEN if raw_is_fine else NOT_FINITE
