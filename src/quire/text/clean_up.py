"""The clean-up of spaces before punctuation that some (non-BPE) tokenizers ask for, whole and as a stream.

`clean_up_tokenization_spaces` of a tokenizer_config.json means a chain of replacements over the decoded text. Each link
of the chain holds back only the longest tail that could still become its pattern, so a stream equals the whole.
transformers ignores the flag for BPE vocabularies, where it would eat real spaces; so does Quire.
"""

from __future__ import annotations

# Order matters: each replacement sees the output of the one before it.
CLEAN_UPS: tuple[tuple[str, str], ...] = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def clean_up(text: str) -> str:
    """Apply the whole chain to a finished text."""
    for old, new in CLEAN_UPS:
        text = text.replace(old, new)
    return text


class CleanUpStream:
    """The chain over text that arrives in pieces: the pieces it returns add up to `clean_up` of the whole."""

    def __init__(self) -> None:
        self._held = [""] * len(CLEAN_UPS)  # per link: a proper prefix of its pattern

    def feed(self, text: str) -> str:
        """Take more text, return what is final."""
        for link, (old, new) in enumerate(CLEAN_UPS):
            *done, tail = (self._held[link] + text).split(old)
            keep = next(n for n in range(min(len(old) - 1, len(tail)), -1, -1) if tail.endswith(old[:n]))
            self._held[link] = tail[len(tail) - keep :]
            text = new.join([*done, tail[: len(tail) - keep]])
        return text

    def finish(self) -> str:
        """Return what was held back; the text is over."""
        text = ""
        for link, (old, new) in enumerate(CLEAN_UPS):
            text = (self._held[link] + text).replace(old, new)
            self._held[link] = ""
        return text
