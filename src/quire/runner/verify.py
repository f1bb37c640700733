"""`verify`: rows of logits → tokens of sequences that have states: drafts, a grammar, logits processors.

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

from quire.runner.sequences import WorkerSeq
from quire.sampling.accept import Draft
from quire.sampling.draft_tree import NO_DRAFTS, ROOT, Drafts, Walk
from quire.sampling.sampler import ALL_FORBIDDEN, NOT_FINITE, Columns, Sampler, SeqSample

if TYPE_CHECKING:
    from quire.sampling.grammars import GrammarState


def verify(logits: Tensor, seqs: Sequence[WorkerSeq], columns: Columns, sampler: Sampler) -> list[SeqSample]:
    """Return what each of ``seqs`` got, and advance its state; what follows a rejected draft is taken back.

    ``logits: [num_logits, vocab] float32`` and ``columns [num_logits]`` have the rows of each sequence in order. A
    sequence whose first row holds a NaN, or whose every id is forbidden there, gets an error and does not advance.
    Where that happens after accepted drafts, its next step meets it at the same position.
    """
    assert logits.shape[0] == columns.size
    if not seqs:
        return []
    firsts = list(accumulate((seq.num_logits for seq in seqs), initial=0))  # [num_seqs + 1]
    # By place in ``seqs``: drafts that may not be accepted.
    barred: dict[int, set[int]] = {}
    errors: dict[int, str] = {}
    _apply_states(logits, seqs, firsts, barred, errors)
    drafts = _drafts_of_rows(seqs, firsts) if sampler.accept != "exact" else None
    walks = _walks(seqs)
    ids, best = sampler.sample(logits, columns, _editor(seqs, firsts, walks, errors), drafts)
    if not all(map(isfinite, best.tolist())):
        _note_failures(logits, ~np.isfinite(best), firsts, barred, errors)
    token_ids: list[int] = ids.tolist()
    tokens_at: list[list[int]] = []  # rows
    tried: dict[int, int] = {}
    followed: list[tuple[GrammarState, int]] = []
    for place, seq in enumerate(seqs):
        first = firsts[place]
        path: list[int] = []
        drafting = seq.drafting
        if drafting is not None and drafting.verifying:
            path = follow(drafting.verifying, token_ids[first : firsts[place + 1]], barred.get(place, set()))
            if drafting.branches or not drafting.num_beside:  # else the tree was cut to its trunk
                drafting.sampled = tuple(token_ids[first : firsts[place + 1]])
            tried[place] = len(path) + ((path[-1] if path else ROOT) in drafting.verifying.parents)
            for state in seq.states:
                state.accept(path)
        tokens_at.append([] if place in errors else [first, *[first + 1 + node for node in path]])
        if place not in errors and seq.processors is not None:
            try:
                if place in walks:
                    walks[place].to(path[-1] if path else ROOT)
                seq.processors.advance(token_ids[tokens_at[-1][-1]])
            except Exception as error:
                errors[place], tokens_at[-1] = _fault(error), []
        if place not in errors and seq.grammar is not None:
            followed.append((seq.grammar, token_ids[tokens_at[-1][-1]]))
    if followed:
        followed[0][0].grammars.follow(followed)
    logprobs = sampler.logprobs(logits, columns, [row for rows in tokens_at for row in rows], token_ids)
    return [
        failed_sample(seqs[place], errors[place], tried.get(place, 0))
        if place in errors
        else SeqSample(
            tuple([token_ids[row] for row in rows]),
            tuple([logprobs[row] for row in rows]) if rows[0] in logprobs else None,
            num_tried=tried.get(place, 0),
        )
        for place, rows in enumerate(tokens_at)
    ]


def _apply_states(
    logits: Tensor, seqs: Sequence[WorkerSeq], firsts: Sequence[int], barred: dict[int, set[int]],
    errors: dict[int, str],
) -> None:  # fmt: skip
    """Let the states of each sequence change its rows; note the drafts that they bar, and their errors, by place."""
    for place, seq in enumerate(seqs):
        for state in seq.states:
            forbidden = state.apply(logits[firsts[place] : firsts[place + 1]], _drafts(seq))
            barred.setdefault(place, set()).update(forbidden)
            if state.error is not None:
                errors[place] = state.error


def failed_sample(seq: WorkerSeq, error: str, num_tried: int = 0) -> SeqSample:
    """Return the sample of a sequence that cannot go on, with whose fault it is."""
    of_request = error == ALL_FORBIDDEN or any(state.error == error for state in seq.states)
    recompute = error == NOT_FINITE or any(state.is_bystander for state in seq.states)
    return SeqSample((), None, error, num_tried, of_request, recompute)


def _drafts(seq: WorkerSeq) -> Drafts:
    """Return the drafts that the step verifies of ``seq``."""
    return NO_DRAFTS if seq.drafting is None else seq.drafting.verifying


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
        place: Walk(drafts, seq.processors.advance, seq.processors.rollback)
        for place, seq in enumerate(seqs)
        if seq.processors is not None and (drafts := _drafts(seq))
    }


def _editor(
    seqs: Sequence[WorkerSeq], firsts: Sequence[int], walks: dict[int, Walk], errors: dict[int, str]
) -> Callable[[int, Tensor], None] | None:
    """Return what applies the logits processors to a row, in their state behind the row's draft; None: there are none.

    An exception in one is an entry of ``errors`` at the place of its sequence.
    """
    owners: dict[int, tuple[int, int]] = {}
    for place, (first, seq) in enumerate(zip(firsts, seqs, strict=False)):
        if seq.processors is not None:
            for node in range(ROOT, seq.num_logits - 1):
                owners[first + 1 + node] = place, node
    if not owners:
        return None

    def edit(row: int, logits: Tensor) -> None:
        place, node = owners[row]
        processors = seqs[place].processors
        assert processors is not None
        try:
            if node != ROOT:
                walks[place].to(node)
            processors.edit(logits)
        except Exception as error:
            errors.setdefault(place, _fault(error))

    return edit


def _drafts_of_rows(seqs: Sequence[WorkerSeq], firsts: Sequence[int]) -> dict[int, list[Draft]]:
    """Return the drafts that may follow each row, by row."""
    drafts_of: dict[int, list[Draft]] = {}
    for first, seq in zip(firsts, seqs, strict=False):
        drafts = _drafts(seq)
        for node, (token_id, parent) in enumerate(zip(drafts.token_ids, drafts.parents, strict=True)):
            probs = [] if seq.drafting is None else seq.drafting.probs
            draft = Draft(token_id, probs[node] if probs else None)
            drafts_of.setdefault(first + 1 + parent, []).append(draft)
    return drafts_of


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
