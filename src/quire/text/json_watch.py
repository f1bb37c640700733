"""`JsonWatch`: rules of a JSON schema that no grammar can hold, checked while the text is written.

The grammar lets through a little too much (`relaxed` in `quire.text.json_schema`): it has no `uniqueItems`, conditions,
counts of properties, and takes properties in any order. The watch follows the text and forbids the tokens that would
complete an item, a name or a value that breaks the schema. So a text that ends is valid. It may happen that no token is
left; the sequence fails then, as with any grammar that cannot go on.

The state is a function of the output ids: a new watch that is advanced over them equals the old one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.text.json_lookahead import Frame, Lookahead, State, name_fits, narrowed
from quire.text.schema_check import SchemaCheck, canonical
from quire.text.schema_negation import NoForm

_SPACE = frozenset(b" \t\r\n")
_ENDS = frozenset(b'",]} \t\r\n')
_PLAIN = re.compile(rb'[^"\\]+')


class Vocabulary:
    """The bytes of tokens, and which of them can complete something."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._quoted = np.array([b'"' in token for token in tokens])
        self._ends = np.array([not _ENDS.isdisjoint(token) for token in tokens])

    def candidates(self, allowed: NDArray[np.bool_], in_string: bool) -> list[int]:
        """Return the allowed ids of which a token may complete something."""
        ends = self._quoted if in_string else self._ends
        return [int(i) for i in np.flatnonzero(allowed[: len(ends)] & ends[: len(allowed)])]


class JsonWatch:
    """One sequence's position."""

    def __init__(self, check: SchemaCheck, vocabulary: Vocabulary) -> None:
        self._check = check
        self._vocabulary = vocabulary
        self._states: list[State | None] = [State()]
        self._ahead = Lookahead(check)

    def __copy__(self) -> JsonWatch:
        made = JsonWatch(self._check, self._vocabulary)
        made._states = list(self._states)
        return made

    @property
    def is_broken(self) -> bool:
        """Whether the tokens so far have completed something that breaks the schema."""
        return self._states[-1] is None

    def advance(self, token_id: int) -> None:
        """Take the next output token."""
        tokens = self._vocabulary.tokens
        state = self._states[-1]
        data = tokens[token_id] if token_id < len(tokens) else b""
        self._states.append(None if state is None else self._after(state, data))

    def take(self, token_ids: Sequence[int]) -> None:
        """Advance over several tokens."""
        for token_id in token_ids:
            self.advance(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` output tokens."""
        del self._states[len(self._states) - num_tokens :]

    def forbid(self, bits: NDArray[np.int32], allowed: NDArray[np.bool_], eos_ids: frozenset[int]) -> None:
        """Clear the ids in a mask (both its forms) whose tokens would complete something that breaks the schema."""
        state, words = self._states[-1], bits.view(np.uint32)
        tokens = self._vocabulary.tokens
        if (
            state is not None and self._ahead.left(state) is not None
        ):  # few ids are allowed, and each may be wrong
            ids = [int(i) for i in np.flatnonzero(allowed)]
        else:
            ids = self._vocabulary.candidates(allowed, state is not None and (state.text or b"")[:1] == b'"')
        known = {b"": state}
        forbidden = [i for i in ids if i not in eos_ids and self._reached(known, tokens[i]) is None]
        for i in (*forbidden, *(() if self.ends() else eos_ids)):
            if i < len(allowed):
                allowed[i] = False
                words[i // 32] &= np.uint32(~(1 << i % 32) & 0xFFFFFFFF)

    def ends(self) -> bool:
        """Return whether the text may end here: a primitive at the top has no closing mark to be forbidden."""
        state = self._states[-1]
        if state is None or state.frames:
            return state is not None
        return not state.text or self._after(state, b" ") is not None

    def _reached(self, known: dict[bytes, State | None], data: bytes) -> State | None:
        """As `_after`, from ``known[b""]``; ``known`` keeps the states after each byte, which tokens share."""
        num = len(data)
        while data[:num] not in known:
            num -= 1
        state = known[data[:num]]
        while state is not None and num < len(data):
            state = known[data[: num + 1]] = self._after(state, data[num : num + 1])
            num += 1
        return state

    def _after(self, state: State, data: bytes) -> State | None:
        """Return the state after more bytes, None if they break the schema."""
        at, after = 0, state
        try:
            while at < len(data):
                in_string = after.text is not None and after.text[:1] == b'"' and not after.escaped
                plain = _PLAIN.match(data, at) if in_string else None
                if plain is None:
                    at, moved = at + 1, self._byte(after, data[at])
                else:
                    assert after.text is not None
                    at, moved = plain.end(), self._begun(replace(after, text=after.text + plain.group()))
                if moved is None:
                    return None
                after = moved
        except (NoForm, ValueError, ArithmeticError, RecursionError):
            return None
        return after

    def _byte(self, state: State, byte: int) -> State | None:
        text = state.text
        if text is not None and text[:1] == b'"':
            if state.escaped or byte == 0x5C:
                return replace(state, text=text + bytes((byte,)), escaped=not state.escaped)
            state = replace(state, text=text + bytes((byte,)))
            return self._completed(state) if byte == 0x22 else self._begun(state)
        if text is not None:
            if byte not in _SPACE and byte not in b",]}":
                return self._begun(replace(state, text=text + bytes((byte,))))
            done = self._completed(state)
            return None if done is None else self._byte(done, byte)
        if byte in _SPACE or byte == 0x3A:
            return state
        if byte == 0x2C:
            after = replace(state, expects_key=isinstance(state.frames[-1].value, dict))
            return None if self._ahead.left(after) == [] else after  # no item or name is left
        if byte in b"{[":
            schemas, may = self._ahead.schemas(state), self._ahead.schemas(state, options=True)
            frame = Frame(schemas, {} if byte == 0x7B else [], may)
            if byte == 0x5B and self._ahead.is_unique(schemas):
                frame = replace(frame, seen=frozenset())
            listed = self._ahead.listed(state)
            if listed is not None:
                frame = replace(frame, options=tuple(v for v in listed if type(v) is type(frame.value)))
                if not frame.options:
                    return None
            return State((*state.frames, frame), expects_key=byte == 0x7B)
        if byte in b"]}":
            frame = state.frames[-1]
            outer = State(state.frames[:-1])
            return self._placed(outer, frame.value, frame.schemas)
        return self._begun(replace(state, text=bytes((byte,)), is_key=state.expects_key))

    def _begun(self, state: State) -> State | None:
        """Return the state, None if the item that is being written can only become one that is there already."""
        left = self._ahead.left(state)
        return state if left is None or any(text.startswith(state.text or b"") for text in left) else None

    def _completed(self, state: State) -> State | None:
        value = json.loads(state.text or b"")
        if not state.is_key:
            return self._placed(replace(state, text=None), value, self._ahead.schemas(state))
        frame = state.frames[-1]
        assert isinstance(frame.value, dict)
        if value in frame.value or not all(
            name_fits(self._check, s, value, frame.value) for s in frame.schemas
        ):
            return None
        return State((*state.frames[:-1], replace(frame, key=value)))

    def _placed(self, state: State, value: Any, schemas: Sequence[Any]) -> State | None:
        """Return the state after a value is complete: in its place, if it is valid and new where it has to be."""
        if not all(self._check.valid(value, schema) for schema in schemas):
            return None
        if not state.frames:
            return State()
        frame = state.frames[-1]
        if isinstance(frame.value, dict):
            assert frame.key is not None
            frame = replace(frame, value={**frame.value, frame.key: value}, key=None)
            return narrowed(state.frames[:-1], frame)
        seen = frame.seen
        if seen is not None:
            text = canonical(value)
            if text in seen:
                return None
            seen |= {text}
        return narrowed(state.frames[:-1], replace(frame, value=[*frame.value, value], seen=seen))
