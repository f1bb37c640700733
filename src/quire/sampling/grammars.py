"""`Grammars`: the grammars of a worker's sequences, compiled and advanced beside the model.

A matcher is built on a thread from the time its sequence is admitted; the mask of the next token is computed on another
thread from the time the last one is sampled. Both run while the model does, and `GrammarState.wait` waits for them.

    admitted ──> build: vocabulary (once), compile or copy, advance through the output so far, first mask
    sampled  ──> follow: all constrained sequences of the step in one call of llguidance, without the GIL
    logits   ──> apply: what the grammar forbids is −inf, before anything else looks at the row
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.errors import QuireError, RequestError
from quire.models.checkpoint import read_tokenizer
from quire.sampling.draft_tree import ROOT, Drafts, Walk
from quire.sampling.seq_state import Means, SeqState
from quire.step import NewSeq
from quire.text.grammar_matcher import (
    GrammarConstraint,
    bitmask_words,
    compile_matcher,
    encode_forced,
    ll_tokenizer,
    mask_threads,
    unpack,
    watch_grammar,
)
from quire.text.json_watch import Vocabulary
from quire.text.token_table import TokenTable, token_table
from quire.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
_MAX_COMPILED = 64  # grammars kept for the requests to come
_MAX_BYTES = 64 * 2**20  # about; all of them together
# A character of the text takes at most as many when it is compiled.
_CHARACTER_BYTES = 80
_TOKEN_BYTES = (
    # A lexer may grow by as many with a token that it takes: it makes its states when it needs them.
    4096
)
# Eight times the stack on which the API side has compiled the same grammar.
_BUILD_STACK_BYTES = 64 << 20
_NO_TOKEN = "structured_outputs: no token of the model's vocabulary can continue the answer here."


class GrammarMask:
    """Which ids a grammar allows at one position: ``bits`` ``[words]``, lowest id first."""

    def __init__(self, bits: NDArray[np.int32], allowed: NDArray[np.bool_]) -> None:
        self.bits = bits
        # Most masks allow few ids, or forbid few.
        self._ids_are_allowed = 2 * int(np.count_nonzero(allowed)) <= allowed.size
        self._ids = torch.from_numpy(np.flatnonzero(allowed if self._ids_are_allowed else ~allowed))

    def allows(self, token_id: int) -> bool:
        return bool(self.bits[token_id // 32] >> (token_id % 32) & 1)

    def apply(self, row: torch.Tensor) -> None:
        """Write −inf over what is forbidden in ``row: [vocab_size]``."""
        ids = self._ids.to(row.device)
        if self._ids_are_allowed:
            values = row.index_select(0, ids)
            row.fill_(-torch.inf).index_copy_(0, ids, values)
        else:
            row.index_fill_(0, ids, -torch.inf)


class CompiledGrammar:
    """A matcher to copy. The copies share its lexer, which grows while they take tokens."""

    def __init__(self, matcher: Any, num_characters: int) -> None:
        self.matcher = matcher
        self._num_characters = num_characters
        self.num_tokens = 0  # taken by the copies

    @property
    def grown_bytes(self) -> int:
        return _TOKEN_BYTES * self.num_tokens

    @property
    def num_bytes(self) -> int:
        return _CHARACTER_BYTES * self._num_characters + self.grown_bytes


class GrammarState(SeqState):
    """The grammar of one sequence. ``masks`` and ``error`` hold once `wait` has returned."""

    def __init__(self, new: NewSeq, grammars: Grammars) -> None:
        self.grammars = grammars
        self._walk: Walk | None = None  # over the drafts being verified
        self.eos_token_ids = frozenset(new.sampling.eos_token_ids)
        self.constraint: GrammarConstraint | None = None
        self.compiled: CompiledGrammar | None = None  # where the constraint is copied from
        # Of the next token; before it those behind the drafts that led there.
        self.masks: list[GrammarMask] = []
        self.error: str | None = None  # why the sequence cannot go on
        # The error may be another sequence's, with which it was advanced.
        self.is_bystander = False
        self.pending: Future[None] | None = None

    @property
    def matcher(self) -> Any:
        assert self.constraint is not None
        return self.constraint.matcher

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.result()

    def apply(self, rows: torch.Tensor, drafts: Drafts) -> set[int]:
        """Mask the rows of the sequence: ``rows[0]`` with its next mask, ``rows[1 + i]`` with that behind draft i.

        The state advances through the drafts that the grammar allows and that do not end the answer; returns the
        others, and those behind them. Their rows are left alone, and so are all rows where ``error`` is set.
        """
        self.wait()
        barred: set[int] = set()
        if self.error is not None:
            return barred
        self.masks[-1].apply(rows[0])
        self._walk = walk = Walk(drafts, self.advance, self.rollback)
        for node, parent in enumerate(drafts.parents):
            if parent in barred:
                barred.add(node)
                continue
            walk.to(parent)
            if self.advance(drafts.token_ids[node]):
                walk.path.append(node)
                self.masks[-1].apply(rows[1 + node])
            else:
                barred.add(node)
        return barred

    def accept(self, path: Sequence[int]) -> None:
        """Keep of the drafts of `apply` those on ``path``, from the root."""
        walk, self._walk = self._walk, None
        if walk is not None:
            walk.to(path[-1] if path else ROOT)

    def rollback(self, num_tokens: int) -> None:
        assert self.constraint is not None
        self.constraint.rollback(num_tokens)
        del self.masks[-num_tokens:]

    def advance(self, token_id: int) -> bool:
        """Take ``token_id``, a draft, unless it is forbidden or the grammar gives up behind it."""
        if token_id in self.eos_token_ids or not self.masks[-1].allows(token_id):
            return False
        assert self.constraint is not None
        before, masks, watch = self.matcher.deep_copy(), self.masks, copy(self.constraint.watch)
        self.grammars.advance([(self, token_id)])
        if self.error is not None:  # the draft may be rejected: the sequence goes on without it
            self.constraint.matcher, self.masks, self.error = before, masks, None
            self.constraint.watch = watch
            return False
        self.masks = [*masks, *self.masks]
        return True


def begin(new: NewSeq, means: Means) -> GrammarState:
    """Begin to build the grammar of ``new`` after its output."""
    grammars: Grammars = means.grammars()
    return grammars.begin(new)


class Grammars:
    """Costs nothing until the first sequence with a grammar comes; llguidance is imported then."""

    def __init__(self, tokenizer: str, vocab_size: int, num_threads: int) -> None:
        """``tokenizer``: its folder or file. ``num_threads``: of the model; a fourth of them computes masks."""
        self._tokenizer_path = tokenizer
        self._vocab_size = vocab_size
        self._num_threads = max(1, num_threads // 4)
        self._tokenizer: Tokenizer | None = None  # read
        self._tables: dict[tuple[int, ...], TokenTable] = {}  # key: EOS ids
        self._tokenizers: dict[tuple[int, ...], tuple[Any, Vocabulary]] = {}  # key: EOS ids
        self._compiled: OrderedDict[tuple[str, tuple[int, ...]], CompiledGrammar] = OrderedDict()
        self._builders: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # held while `_builders` is made
        self._followers: ThreadPoolExecutor | None = None
        self._executor: Any = None  # llguidance's own threads
        self._together = True  # whether one call advances all sequences of a step

    def begin(self, new: NewSeq) -> GrammarState:
        """Begin to build the state of ``new``, which has a grammar, after its output ids."""
        state = GrammarState(new, self)
        state.pending = self._builder().submit(self._guard, [state], lambda: self._build(state, new))
        return state

    def prepare(self, eos_token_ids: Sequence[int], wait: Callable[[], bool]) -> threading.Thread | None:
        """Build on a thread what the first grammar needs of the vocabulary, with ``wait`` before each part.

        ``eos_token_ids``: of the model; the tokenizer's are added. ``wait`` returns False when the engine ends.
        """
        if not self._tokenizer_path or importlib.util.find_spec("llguidance") is None:
            return None

        def parts() -> Iterator[Callable[[], object]]:
            yield self._read
            eos = tuple(dict.fromkeys((*eos_token_ids, *self._read().eos_token_ids)))
            if any(token_id < self._vocab_size for token_id in eos):
                yield partial(self._table_for, eos)
                yield partial(self._tokenizer_for, eos)

        def run() -> None:
            # On the builders' thread: a request that needs the same meanwhile finds it there, or waits for it.
            try:
                for part in parts():
                    if not wait():
                        return
                    self._builder().submit(part).result()
            except Exception as error:  # the request that needs it is told
                _log.warning("tables for grammars are built with the first one: %s", error)

        thread = threading.Thread(target=run, name="quire-grammar-tables", daemon=True)
        thread.start()
        return thread

    def follow(self, sampled: Sequence[tuple[GrammarState, int]]) -> None:
        """Take the tokens sampled, and begin to compute the masks of the next ones."""
        # After its end an answer has no next token.
        moved = [(state, token_id) for state, token_id in sampled if token_id not in state.eos_token_ids]
        if not moved:
            return
        if self._followers is None:
            self._followers = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")
        states = [state for state, _ in moved]
        pending = self._followers.submit(self.advance, moved)
        for state in states:
            state.pending = pending

    def advance(self, moved: Sequence[tuple[GrammarState, int]]) -> None:
        """Take a token of each state, and compute the mask of the next; what goes wrong is its ``error``."""
        if not self._together:
            for move in moved:
                self._guard([move[0]], partial(self._follow, [move]))
            return
        self._guard([state for state, _ in moved], lambda: self._follow(moved))

    def _builder(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._builders is None:
                made = ThreadPoolExecutor(1, thread_name_prefix="quire-grammar")
                before = threading.stack_size(_BUILD_STACK_BYTES)
                try:
                    made.submit(int).result()  # the thread starts here, with that stack
                finally:
                    threading.stack_size(before)
                self._builders = made
            return self._builders

    def _guard(self, states: Sequence[GrammarState], work: Callable[[], None]) -> None:
        """Whatever goes wrong fails these sequences and nothing else."""
        try:
            work()
        except (QuireError, ImportError) as error:
            for state in states:
                state.error = f"structured_outputs: {error}"
        except BaseException as error:  # llguidance's panics are no `Exception`
            # Where several were advanced together, the call does not tell which is at fault: never again together.
            self._together = self._together and len(states) == 1
            for state in states:
                state.error = f"structured_outputs: {type(error).__name__}: {error}"
                state.is_bystander = len(states) > 1

    def _build(self, state: GrammarState, new: NewSeq) -> None:
        assert new.grammar is not None
        key = (new.grammar, tuple(new.sampling.eos_token_ids))
        self._forget()
        compiled = self._compiled.get(key)
        if compiled is None:
            matcher = compile_matcher(self._tokenizer_for(key[1])[0], new.grammar)
            if matcher.is_error():
                raise RequestError(str(matcher.get_error()))
            compiled = self._compiled[key] = CompiledGrammar(matcher, len(new.grammar))
            self._forget()
        else:
            self._compiled.move_to_end(key)
        state.compiled = compiled
        watch = watch_grammar(*self._watched(new.grammar, key[1])) if "\n" in new.grammar else None
        state.constraint = GrammarConstraint(
            compiled.matcher.deep_copy(), self._vocab_size, new.output_token_ids, watch, state.eos_token_ids
        )
        compiled.num_tokens += len(new.output_token_ids)
        self._mask([state])

    def _forget(self) -> None:
        """Forget what was used least recently while all take too much, and one that alone grew too large."""
        grammars = self._compiled
        num_bytes = sum(compiled.num_bytes for compiled in grammars.values())
        while len(grammars) > _MAX_COMPILED or (num_bytes > _MAX_BYTES and len(grammars) > 1):
            num_bytes -= grammars.popitem(last=False)[1].num_bytes
        if len(grammars) == 1 and next(iter(grammars.values())).grown_bytes > _MAX_BYTES:
            grammars.clear()

    def _watched(self, grammar: str, eos_token_ids: tuple[int, ...]) -> tuple[Any, str, Vocabulary]:
        tokenizer, vocabulary = self._tokenizer_for(eos_token_ids)
        return tokenizer, grammar, vocabulary

    def _tokenizer_for(self, eos_token_ids: tuple[int, ...]) -> tuple[Any, Vocabulary]:
        known = self._tokenizers.get(eos_token_ids)
        if known is None:
            table = self._table_for(eos_token_ids)
            made = ll_tokenizer(table, encode_forced(self._read())), Vocabulary(table.tokens)
            known = self._tokenizers[eos_token_ids] = made
        return known

    def _table_for(self, eos_token_ids: tuple[int, ...]) -> TokenTable:
        if eos_token_ids not in self._tables:
            self._tables[eos_token_ids] = token_table(self._read(), self._vocab_size, eos_token_ids)
        return self._tables[eos_token_ids]

    def _read(self) -> Tokenizer:
        if self._tokenizer is None:
            if not self._tokenizer_path:
                raise RequestError("this worker has no tokenizer, so it cannot follow a grammar.")
            self._tokenizer = read_tokenizer(Path(self._tokenizer_path))
        return self._tokenizer

    def _follow(self, moved: Sequence[tuple[GrammarState, int]]) -> None:
        self._masks().consume_token_par([(state.matcher, token_id) for state, token_id in moved])
        for state, token_id in moved:
            assert state.compiled is not None
            assert state.constraint is not None
            state.compiled.num_tokens += 1
            if state.constraint.watch is not None:
                state.constraint.watch.advance(token_id)
        self._mask([state for state, _ in moved])

    def _mask(self, states: Sequence[GrammarState]) -> None:
        """Compute the masks of the next tokens."""
        bits = np.zeros((len(states), bitmask_words(self._vocab_size)), np.int32)
        jobs = [(state.matcher, row) for row, state in enumerate(states)]
        self._masks().unsafe_compute_mask_ptr(jobs, bits.ctypes.data, bits[0].nbytes, len(states))
        allowed = unpack(bits, self._vocab_size)
        for row, state in enumerate(states):
            assert state.constraint is not None
            state.constraint.check(bits[row], allowed[row])
            error = state.constraint.error
            if error is not None:
                state.error = f"structured_outputs: {error}."
            elif not bits[row].any():
                state.error = _NO_TOKEN
            state.masks = [GrammarMask(bits[row], allowed[row])]

    def _masks(self) -> Any:
        if self._executor is None:
            self._executor = mask_threads(self._num_threads)
        return self._executor
