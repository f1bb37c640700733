"""`StopMatcher`: finds stop strings in a stream of text and holds back as little text as possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Watches a text for stop strings (Aho & Corasick 1975).

    Text is released at once, except for the longest tail that is a proper prefix of a stop string. The match that ends
    first wins; of two that end together, the longer one. The result does not depend on how the text is cut into pieces.

    After a match, ``matched`` is the stop string, and no more text is released.
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        assert all(stop), "a stop string is not empty"
        self._include = include_stop_str_in_output
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._word: list[str | None] = [None]  # longest stop string that ends in this state
        for word in stop:
            self._add(word)
        self._link()
        self._state = 0
        self._pending = ""  # the last `depth` characters, not yet released
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Take more text, return what may be shown."""
        if self.matched is not None:
            return ""
        state = self._state
        for index, char in enumerate(text):
            while char not in self._next[state] and state:
                state = self._fail[state]
            state = self._next[state].get(char, 0)
            word = self._word[state]
            if word is not None:
                return self._end(word, text[: index + 1])
        self._state = state
        text = self._pending + text
        cut = len(text) - self._depth[state]
        self._pending = text[cut:]
        return text[:cut]

    def pass_through(self, text: str) -> str:
        """Take text in which a stop string does not count (before `min_tokens`), return all of it that may be shown."""
        if self.matched is not None:
            return ""
        text = self._pending + text
        self._state, self._pending = 0, ""
        return text

    def finish(self) -> str:
        """Return the tail that was held back at the end of the text."""
        return self.pass_through("")

    def _end(self, word: str, text: str) -> str:
        self.matched = word
        text, self._pending = self._pending + text, ""
        return text if self._include else text[: len(text) - len(word)]

    def _add(self, word: str) -> None:
        state = 0
        for char in word:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._word.append(None)
            state = self._next[state][char]
        self._word[state] = word

    def _link(self) -> None:
        """Point each state at the state of its longest proper suffix, breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                suffix = self._fail[state]
                while char not in self._next[suffix] and suffix:
                    suffix = self._fail[suffix]
                self._fail[child] = self._next[suffix].get(char, 0)
                if self._word[child] is None:
                    self._word[child] = self._word[self._fail[child]]
                queue.append(child)
