"""`Grammars`: the grammars of a worker's sequences, compiled and followed beside the model.

A matcher is built on a thread from the time its sequence is admitted; the mask of the next token is computed on another
from the time the last one is drawn. Both run while the model does, and `apply` waits for what is not ready.

    admitted ──> build: vocabulary (once), compile or copy, follow the output so far, first mask
    drawn    ──> follow: all constrained rows of the step in one call of llguidance, without the GIL
    logits   ──> apply: what the grammar forbids is −inf, before anything else looks at the row
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.errors import QuireError, RequestError
from quire.models.checkpoint import read_tokenizer
from quire.sampling.sampler import SeqSample
from quire.step import NewSeq
from quire.text.grammar_matcher import (
    GrammarConstraint,
    bitmask_words,
    compile_matcher,
    encode_forced,
    ll_tokenizer,
    mask_threads,
    token_table,
    unpack,
)

_MAX_COMPILED = 64  # grammars kept for the requests to come
_BUILD_STACK_BYTES = 64 << 20  # eight times the stack on which the API side has compiled the same grammar
_NO_TOKEN = "structured_outputs: no token of the model's vocabulary can continue the answer here."


class Entry:
    """One constrained sequence. Of its next token, once ``pending`` is done: ``bits`` of those allowed, and the ids
    allowed or those forbidden, whichever are fewer.
    """

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self.constraint: GrammarConstraint | None = None
        self.ids = torch.empty(0, dtype=torch.int64)
        self.ids_are_allowed = True
        self.bits = np.empty(0, np.int32)
        self.error: str | None = None
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pending: Future[None] | None = None

    def wait(self) -> None:
        """Until all of this is there."""
        if self.pending is not None:
            self.pending.result()


class Grammars:
    """Costs nothing until the first sequence with a grammar comes; llguidance is imported then."""

    def __init__(self, tokenizer: str, vocab_size: int, num_threads: int) -> None:
        """``tokenizer``: its folder or file. ``num_threads``: of the model; a fourth of them computes masks."""
        self._tokenizer_path = tokenizer
        self._vocab_size = vocab_size
        self._num_threads = max(1, num_threads // 4)
        self._entries: dict[int, Entry] = {}
        self._tokenizers: dict[tuple[int, ...], Any] = {}  # by EOS ids
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], Any] = OrderedDict()
        self._builders: ThreadPoolExecutor | None = None
        self._followers: ThreadPoolExecutor | None = None
        self._executor: Any = None  # llguidance's own threads

    def add(self, new: NewSeq) -> None:
        """Begin to build the matcher of ``new``, if it has a grammar; the state comes from its output ids."""
        self._entries.pop(new.seq_id, None)
        if new.grammar is None:
            return
        entry = self._entries[new.seq_id] = Entry(new.sampling.eos_token_ids)
        entry.pending = self._builder().submit(self._guard, [entry], lambda: self._build(entry, new))

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; one without a grammar is fine."""
        self._entries.pop(seq_id, None)

    def apply(self, logits: torch.Tensor, seq_ids: Sequence[int]) -> dict[int, str]:
        """Write −inf over what the grammars forbid in ``logits: [len(seq_ids), vocab_size]``.

        Returns the sequences that cannot go on, with the reason; their rows are left alone.
        """
        failed: dict[int, str] = {}
        if not self._entries:
            return failed
        for row, seq_id in enumerate(seq_ids):
            entry = self._entries.get(seq_id)
            if entry is None:
                continue
            entry.wait()
            if entry.error is not None:
                failed[seq_id] = entry.error
            else:
                _forbid(logits[row], entry)
        return failed

    def held(self, seq_ids: Sequence[int]) -> list[Entry | None]:
        """What there is now of each of ``seq_ids``; one that comes back after a preemption gets another."""
        return [self._entries.get(seq_id) for seq_id in seq_ids]

    def follow(self, entries: Sequence[Entry | None], samples: Sequence[SeqSample]) -> None:
        """Take the tokens drawn for ``entries`` (`held`), and begin to compute the next masks."""
        moved: list[tuple[Entry, int]] = []
        for entry, sample in zip(entries, samples, strict=True):
            if entry is None or sample.error is not None or entry.error is not None:
                continue
            if sample.token_id not in entry.eos_token_ids:  # else it has ended: there is no next token
                moved.append((entry, sample.token_id))
        if moved:
            if self._followers is None:
                self._followers = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")
            waiting = [entry for entry, _ in moved]
            pending = self._followers.submit(self._guard, waiting, lambda: self._follow(moved))
            for entry in waiting:
                entry.pending = pending

    def _builder(self) -> ThreadPoolExecutor:
        if self._builders is None:
            self._builders = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
            before = threading.stack_size(_BUILD_STACK_BYTES)
            try:
                self._builders.submit(int).result()  # the thread starts here, with that stack
            finally:
                threading.stack_size(before)
        return self._builders

    def _guard(self, entries: Sequence[Entry], work: Callable[[], None]) -> None:
        """Whatever goes wrong fails these sequences and nothing else."""
        try:
            work()
        except (QuireError, ImportError) as error:
            for entry in entries:
                entry.error = f"structured_outputs: {error}"
        except BaseException as error:  # llguidance's panics are no `Exception`
            for entry in entries:
                entry.error = f"structured_outputs: {type(error).__name__}: {error}"

    def _build(self, entry: Entry, new: NewSeq) -> None:
        assert new.grammar is not None
        key = (new.grammar, tuple(new.sampling.eos_token_ids))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = compile_matcher(self._tokenizer_for(key[1]), new.grammar)
            if compiled.is_error():
                raise RequestError(str(compiled.get_error()))
            self._compiled[key] = compiled
            if len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(key)
        entry.constraint = GrammarConstraint(compiled.deep_copy(), self._vocab_size, new.output_token_ids)
        self._mask([entry])

    def _tokenizer_for(self, eos_token_ids: tuple[int, ...]) -> Any:
        known = self._tokenizers.get(eos_token_ids)
        if known is None:
            if not self._tokenizer_path:
                raise RequestError("this worker has no tokenizer, so it cannot follow a grammar.")
            tokenizer = read_tokenizer(Path(self._tokenizer_path))
            table = token_table(tokenizer, self._vocab_size, eos_token_ids)
            known = self._tokenizers[eos_token_ids] = ll_tokenizer(table, encode_forced(tokenizer))
        return known

    def _follow(self, moved: Sequence[tuple[Entry, int]]) -> None:
        executor = self._masks()
        executor.consume_token_par([(_matcher(entry), token_id) for entry, token_id in moved])
        self._mask([entry for entry, _ in moved])

    def _mask(self, entries: Sequence[Entry]) -> None:
        """Compute the masks of the next tokens."""
        bits = np.zeros((len(entries), bitmask_words(self._vocab_size)), np.int32)
        jobs = [(_matcher(entry), row) for row, entry in enumerate(entries)]
        self._masks().unsafe_compute_mask_ptr(jobs, bits.ctypes.data, bits[0].nbytes, len(entries))
        allowed = unpack(bits, self._vocab_size)
        for row, entry in enumerate(entries):
            assert entry.constraint is not None
            error = entry.constraint.error
            if error is not None:
                entry.error = f"structured_outputs: {error}."
            elif not bits[row].any():
                entry.error = _NO_TOKEN
            entry.bits = bits[row]
            _note_ids(entry, allowed[row])

    def _masks(self) -> Any:
        if self._executor is None:
            self._executor = mask_threads(self._num_threads)
        return self._executor


def _note_ids(entry: Entry, allowed: NDArray[np.bool_]) -> None:
    entry.ids_are_allowed = 2 * int(np.count_nonzero(allowed)) <= allowed.size
    entry.ids = torch.from_numpy(np.flatnonzero(allowed if entry.ids_are_allowed else ~allowed))


def _forbid(row: torch.Tensor, entry: Entry) -> None:
    """Write −inf into ``row: [vocab_size]``; most masks allow or forbid few ids."""
    ids = entry.ids.to(row.device)
    if entry.ids_are_allowed:
        kept = row.index_select(0, ids)
        row.fill_(-torch.inf).index_copy_(0, ids, kept)
    else:
        row.index_fill_(0, ids, -torch.inf)


def _matcher(entry: Entry) -> Any:
    assert entry.constraint is not None
    return entry.constraint.matcher
