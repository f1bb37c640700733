"""White space at the borders of sections."""

from __future__ import annotations

from quire.text.output.reader import Emit


class Trimmed:
    """Text of a section. White space at its end is held until more follows, and goes where another section follows."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held = ""
        self._drop_leading = False
        self.shown = False  # whether there was anything but white space

    def add(self, text: str) -> None:
        if self._drop_leading:
            text = text.lstrip()
            if not text:
                return
            self._drop_leading = False
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept:
            self.shown = True
            self._emit(kept)

    def after_section(self) -> None:
        """A section ended or began here: white space around it belongs to it."""
        self._held = ""
        self._drop_leading = True

    def end(self) -> None:
        """The text ends here: white space that nothing follows is shown."""
        if self._held:
            self._emit(self._held)
            self._held = ""
