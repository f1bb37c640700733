"""`verify`: the one place where rows of logits become tokens of sequences.

A sequence has one row for its last known token and one for each draft that the step verifies:

    row       last known   draft 0   draft 1   draft 2
    samples   a            b         c         ·             accepted: draft 0 = a, draft 1 = b, draft 2 ≠ c
    result    a, b, c                                        the accepted drafts and the one token that follows them

Each row is sampled with the noise of its own position and with the state after the drafts before it, so the tokens are
those of plain decoding at any temperature, and without drafts this is plain sampling. With another rule of acceptance
(`quire.sampling.accept`) the sampler looks at the draft of a row, and returns it where it accepts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from quire.runner.sequences import WorkerSeq, WorkerSeqs
from quire.sampling.accept import Draft
from quire.sampling.grammars import Grammars, GrammarState
from quire.sampling.processors import LogitsProcessors
from quire.sampling.sampler import ALL_FORBIDDEN, NOT_FINITE, Columns, Sampler, SeqSample


def verify(
    logits: Tensor, table: WorkerSeqs, seqs: Sequence[WorkerSeq], columns: Columns, sampler: Sampler, grammars: Grammars
) -> list[SeqSample]:  # fmt: skip
    """Return what each of ``seqs`` got, and advance its state; what follows a rejected draft is taken back.

    ``logits: [num_logits, vocab] float32`` and ``columns [num_logits]`` have the rows of each sequence in order. A
    sequence whose first row holds a NaN, or whose every id is forbidden there, gets an error and does not advance.
    Where that happens after accepted drafts, its next step meets it at the same position.
    """
    assert logits.shape[0] == columns.size
    if not seqs:
        return []
    firsts = list(accumulate((1 + len(seq.draft_ids) for seq in seqs), initial=0))  # [num_seqs + 1]
    limits = [len(seq.draft_ids) for seq in seqs]  # how many drafts may be accepted
    errors: dict[int, str] = {}  # by place in seqs
    for place, seq in enumerate(seqs):
        if seq.grammar is not None:
            limits[place] = seq.grammar.apply(logits[firsts[place] : firsts[place + 1]], seq.draft_ids)
            if seq.grammar.error is not None:
                errors[place] = seq.grammar.error
    drafts = _drafts(seqs, firsts) if sampler.accept != "exact" else None
    ids, best = sampler.sample(logits, columns, _editor(seqs, firsts, errors), drafts)
    if not np.isfinite(best).all():
        _note_failures(logits, ~np.isfinite(best), firsts, limits, errors)
    token_ids: list[int] = ids.tolist()
    kept: list[range] = []  # rows
    followed: list[tuple[GrammarState, int]] = []
    for place, seq in enumerate(seqs):
        first, count, limit = firsts[place], 0, limits[place]
        while count < limit and token_ids[first + count] == seq.draft_ids[count]:
            count += 1
        if seq.draft_ids:
            table.rollback(seq, len(seq.draft_ids) - count)
            seq.draft_ids = ()
        kept.append(range(first, first if place in errors else first + count + 1))
        if place not in errors and seq.processors is not None:
            try:
                seq.processors.advance(token_ids[first + count])
            except Exception as error:
                errors[place], kept[-1] = _fault(error), range(0)
        if place not in errors and seq.grammar is not None:
            followed.append((seq.grammar, token_ids[first + count]))
    if followed:
        grammars.follow(followed)
    found = sampler.logprobs(logits, columns, [row for rows in kept for row in rows], token_ids)
    return [
        SeqSample(
            tuple(token_ids[row] for row in rows),
            tuple(found[row] for row in rows) if rows and rows[0] in found else None,
            errors.get(place),
        )
        for place, rows in enumerate(kept)
    ]


def _editor(
    seqs: Sequence[WorkerSeq], firsts: Sequence[int], errors: dict[int, str]
) -> Callable[[int, Tensor], None]:
    """Return what applies the logits processors to a row, and then lets them take the draft behind it.

    An exception in one is an entry of ``errors`` at the place of its sequence.
    """
    of: dict[int, tuple[int, LogitsProcessors, tuple[int, ...]]] = {}
    for place, (first, seq) in enumerate(zip(firsts, seqs, strict=False)):
        if seq.processors is not None:
            for draft in range(1 + len(seq.draft_ids)):
                of[first + draft] = place, seq.processors, seq.draft_ids[draft : draft + 1]

    def edit(row: int, logits: Tensor) -> None:
        place, processors, drafts = of[row]
        try:
            processors.apply(logits)
            for token_id in drafts:
                processors.advance(token_id)
        except Exception as error:
            errors.setdefault(place, _fault(error))

    return edit


def _drafts(seqs: Sequence[WorkerSeq], firsts: Sequence[int]) -> dict[int, Draft]:
    """Return the draft that each row verifies, by row."""
    return {
        first + place: Draft(token_id, seq.draft_probs[place] if seq.draft_probs else None)
        for first, seq in zip(firsts, seqs, strict=False)
        for place, token_id in enumerate(seq.draft_ids)
    }


def _fault(error: Exception) -> str:
    return f"a logits processor failed: {type(error).__name__}: {error}"


def _note_failures(
    logits: Tensor, failed: np.ndarray[tuple[int], np.dtype[np.bool_]], firsts: Sequence[int], limits: list[int],
    errors: dict[int, str],
) -> None:  # fmt: skip
    """A first row that ``failed`` is an error; a later one ends the drafts that may be accepted before it."""
    for place, (first, limit) in enumerate(zip(firsts, list(limits), strict=False)):
        bad = np.flatnonzero(failed[first : first + 1 + limit])
        if bad.size and bad[0] > 0:
            limits[place] = int(bad[0]) - 1
        elif bad.size and place not in errors:
            raw_is_fine = bool(torch.isfinite(logits[first].amax()))
            errors[place] = ALL_FORBIDDEN if raw_is_fine else NOT_FINITE
