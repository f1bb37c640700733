"""gpt-oss: an answer is messages ``header <|message|> body <|end|>``; the header's channel says what the body is."""

from __future__ import annotations

import re

from quire.text.output.reader import Emit, Reader, Wait
from quire.text.output.sections import Arguments, Begin
from quire.text.output.trimmed import Trimmed

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_BEGINNINGS = ("<|channel|>", "to=", "<|start|>", "<|message|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")


def harmony(
    reader: Reader, content: Trimmed, reasoning: Emit, begin: Begin | None, arguments: Arguments
) -> Wait[None]:
    """Read the whole answer. ``begin`` None: there are no tools, and what is addressed to one is content."""
    content.add((yield from reader.space()))
    if (yield from reader.starts(_BEGINNINGS)) is None:
        yield from reader.until((), content.add)  # no header: an answer in plain text
        content.end()
        return
    stop: str | None = ""
    while stop is not None:
        header: list[str] = []
        if (yield from reader.until(("<|message|>",), header.append)) is None:
            break  # a header without a message says nothing
        head = "".join(header)
        channel, recipient = _CHANNEL.search(head), _RECIPIENT.search(head)
        if recipient is not None and begin is not None:
            begin(recipient.group(1), None)
            stop = yield from reader.until(_ENDS, arguments)
        elif channel is not None and channel.group(1) == "analysis":
            text = Trimmed(reasoning)
            text.after_section()
            stop = yield from reader.until(_ENDS, text.add)
        else:
            content.after_section()
            stop = yield from reader.until(_ENDS, content.add)
    content.end()
