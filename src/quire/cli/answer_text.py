"""How `quire chat` shows an answer: text that arrives in pieces is wrapped at words, and its end is explained."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from quire.engine.output import OutputChunk
from quire.request import FinishReason

_TOKEN = re.compile(r"\n| +|\t|[^\s]+|\s")


class WordWrap:
    """Writes a stream of text so that no line is wider than the terminal and no word is cut that fits a line.

    A word is held back until the white space behind it arrives. ``width`` is asked at every word, since a terminal
    may be resized.
    """

    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        self._write, self._width = write, width
        self._column = 0
        self._space = ""  # before the next word; dropped where the line ends
        self._word = ""

    def feed(self, text: str) -> None:
        """Take the next piece."""
        out: list[str] = []
        for token in _TOKEN.findall(text):
            if not token.isspace():
                self._word += token
                continue
            self._end_word(out)
            if token == "\n":
                self._space, self._column = "", 0
                out.append("\n")
            else:
                self._space += "    " if token == "\t" else token
        # Scripts without spaces, and words longer than a line, go out as they come.
        if cell_len(self._word) > min(40, self._width() // 2):
            self._end_word(out)
        self._write("".join(out))

    def close(self) -> None:
        """Write the last word."""
        out: list[str] = []
        self._end_word(out)
        self._write("".join(out))

    def _end_word(self, out: list[str]) -> None:
        word, self._word = self._word, ""
        if not word:
            return
        width, cells = max(10, self._width()), cell_len(word)
        if self._column and self._column + len(self._space) + cells > width:
            out.append("\n")
            self._column = 0
            if self._space:
                self._space = ""
        out.append(self._space)
        self._column += len(self._space)
        self._space = ""
        while self._column + cells > width:
            head = set_cell_size(word, width - self._column).rstrip(" ")
            out += [head, "\n"]
            word, self._column = word[len(head) :], 0
            cells = cell_len(word)
        out.append(word)
        self._column += cells


@dataclass(slots=True)
class AnswerEnd:
    """What is said below an answer: its tokens, their speed, and why it ended."""

    begun_s: float
    num_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    reason: FinishReason | None = None
    stop: int | str | None = None

    def take(self, chunk: OutputChunk, now_s: float) -> None:
        """Count a chunk that arrived at ``now_s``."""
        if chunk.token_ids:
            self.num_tokens += len(chunk.token_ids)
            self.last_s = now_s
            if self.first_s is None:
                self.first_s = now_s
        if chunk.finish_reason is not None:
            self.reason, self.stop = chunk.finish_reason, chunk.stop_reason

    def line(self, *, stopped: bool, max_tokens: int, fills_context: bool) -> str:
        """Return the line; ``max_tokens`` is the limit that the answer had."""
        parts = [f"{self.num_tokens:,} token{'s' * (self.num_tokens != 1)}"]
        if self.first_s is not None:
            if self.num_tokens > 1 and self.last_s > self.first_s:
                parts.append(f"{(self.num_tokens - 1) / (self.last_s - self.first_s):,.1f} tokens/s")
            parts.append(f"first after {self.first_s - self.begun_s:.2f} s")
        return f"{', '.join(parts)}; {self._why(stopped, max_tokens, fills_context)}"

    def _why(self, stopped: bool, max_tokens: int, fills_context: bool) -> str:
        if stopped:
            return "stopped by Ctrl-C"
        match self.reason:
            case FinishReason.LENGTH if fills_context:
                return "cut: the context is full (/reset starts anew)"
            case FinishReason.LENGTH:
                return f"cut at --max-tokens {max_tokens}"
            case FinishReason.STOP:
                return "the model ended it" if self.stop is None else f"ended at {self.stop!r}"
        return f"ended: {self.reason.value if self.reason else 'the stream broke off'}"
