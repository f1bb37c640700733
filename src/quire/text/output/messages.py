"""Answers that consist of messages, each with a header that says what it is: gpt-oss' harmony and its relatives."""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.text.output.formats import MessageForm
from quire.text.output.reader import Emit, Reader, Trimmed, Wait
from quire.text.output.sections import Arguments, Begin


def read_messages(
    reader: Reader,
    form: MessageForm,
    content: Trimmed,
    reasoning: Emit,
    begin: Begin | None,
    arguments: Arguments,
    body: Callable[[], Wait[None]] | None,
) -> Wait[None]:
    """Read a whole answer. A message to a tool is its arguments as JSON, or what ``body`` reads.

    ``begin`` None: there are no tools, and a message to one is content.
    """
    content.add((yield from reader.space()))
    if (yield from reader.starts(form.beginnings)) is None:
        yield from reader.until((), content.add)  # no header: an answer in plain text
        content.end()
        return
    stop: str | None = ""
    while stop is not None:
        header: list[str] = []
        if (yield from reader.until((form.mark,), header.append)) is None:
            break  # a header without a message says nothing
        head = "".join(header)
        recipient = re.search(form.recipient, head)
        if recipient is not None and begin is not None and body is None:
            begin(recipient.group(1), None)
            stop = yield from reader.until(form.ends, arguments)
        elif recipient is not None and begin is not None and body is not None:
            yield from reader.space()
            yield from body()
            stop = yield from reader.until(form.ends, content.add)
        elif re.search(form.reasoning, head):
            text = Trimmed(reasoning)
            text.after_section()
            stop = yield from reader.until(form.ends, text.add)
        else:
            content.after_section()
            stop = yield from reader.until(form.ends, content.add)
    content.end()
