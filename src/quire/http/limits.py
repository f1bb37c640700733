"""Limits on what one request may hold, checked before any work is done on it: the one table.

docs/security.md prints it.

Each bounds a cost in the process that answers requests, so that no request delays another one. All are far above what
OpenAI's API allows where that has a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.args import EngineArgs, defaults
from quire.errors import RequestError, clip
from quire.units import MIB


class Limit(NamedTuple):
    """The most elements that a list or an object may have, and the most characters of each text in it."""

    elements: int | None = None
    characters: int | None = None


# By the path of the field in the body. A list of token ids is bounded by the model's context instead.
FIELDS: Mapping[str, Limit] = {
    "messages": Limit(4096),
    "input": Limit(4096),
    "prompt": Limit(2048),
    "documents": Limit(2048),
    "text_1": Limit(2048),
    "text_2": Limit(2048),
    "tools": Limit(512),
    "stop": Limit(64, 4096),
    "stop_sequences": Limit(64, 4096),
    "stop_token_ids": Limit(1024),
    "bad_words": Limit(512, 1024),
    "logit_bias": Limit(4096),
    "allowed_token_ids": Limit(65_536),
    "guided_choice": Limit(8192),
    "structured_outputs.choice": Limit(8192),
    "tokens": Limit(262_144),
    "chat_template_kwargs": Limit(64),
    "metadata": Limit(64, 4096),
    "include": Limit(64, 1024),
    "model": Limit(characters=1024),
    "user": Limit(characters=1024),
    "cache_salt": Limit(characters=1024),
    "request_id": Limit(characters=1024),
    "rid": Limit(characters=1024),
}
# Of what a client has named, in errors, rows and logs.
NAME_CHARS = 200
BODY_FIELDS = 256  # names at the top of a body
# The least limits above: a body with no more bytes and fewer commas is within all of them.
SMALL_BYTES = min(limit.characters for limit in FIELDS.values() if limit.characters)
SMALL_ELEMENTS = min(limit.elements for limit in FIELDS.values() if limit.elements)
# Of the whole body, lists of token ids apart.
BODY_CONTAINERS = 65_536  # lists and objects
BODY_VALUES = 262_144  # texts, numbers, true, false, null
LIST_IDS = 2 * 2**20  # token ids in one list
# A text that the context does not bound: of /tokenize, a token count, or a prompt that is truncated.
TEXT_CHARACTERS = 4 * 2**20
FORM_PARTS = 16
FORM_HEADER_BYTES = 4096  # the headers of one part
CONTENT_TYPE_BYTES = 1024
BATCH_LINE_BYTES = TEXT_CHARACTERS
# A body beyond these is parsed in a helper process.
INLINE_BYTES = 2**20
INLINE_MARKS = 20_000  # commas and opening brackets: an upper bound of its values
# Bodies that wait for the helper together, in bytes: as much as requests that wait for the engine.
WAITING_BYTES = defaults(EngineArgs)["max_queue_mib"] * MIB


def takes_long(pieces: Sequence[bytes]) -> bool:
    """Whether a body, given in pieces, is too large or has too many values to be parsed at once."""
    return sum(map(len, pieces)) > INLINE_BYTES or num_marks(pieces) > INLINE_MARKS


def num_marks(pieces: Sequence[bytes]) -> int:
    """Return the number of commas and opening brackets, an upper bound of the number of values."""
    return sum(piece.count(mark) for piece in pieces for mark in (b",", b"[", b"{"))


def check_fields(body: Any) -> None:
    """Check the fields of a body against the table.

    Raises:
        RequestError: names the first field that is above its limit, its size and what is allowed.
    """
    if not isinstance(body, dict):
        return  # `parse` refuses it
    if len(body) > BODY_FIELDS:
        raise too_many("The body", len(body), BODY_FIELDS, "fields")
    for name in body.keys() & _TOP:
        _check(name, body[name], FIELDS[name])
    form = body.get("structured_outputs")
    if isinstance(form, dict):
        _check("structured_outputs.choice", form.get("choice"), FIELDS["structured_outputs.choice"])


_TOP = frozenset(name for name in FIELDS if "." not in name)


def _check(name: str, value: Any, limit: Limit) -> None:
    if isinstance(value, str):
        texts: Any = (value,)
    elif isinstance(value, list | dict):
        ids = name in ("prompt", "input") and isinstance(value, list) and value and isinstance(value[0], int)
        if limit.elements is not None and len(value) > limit.elements and not ids:
            raise too_many(name, len(value), limit.elements, "elements")
        texts = value.values() if isinstance(value, dict) else value
    else:
        return
    if limit.characters is not None:
        for text in texts:
            if isinstance(text, str) and len(text) > limit.characters:
                raise too_many(f"A text of {name}", len(text), limit.characters, "characters", name)


def too_many(what: str, num: int, most: int, unit: str, param: str | None = None) -> RequestError:
    """Return the error for a value beyond its limit. ``param``: the field, if ``what`` is not its name."""
    field = param or (None if " " in what else what)
    return RequestError(
        f"{what} has {num} {unit}: at most {most} are allowed in one request.",
        param=field,
        code="limit_exceeded",
    )


def check_whole(body: Any, max_characters: int) -> None:
    """Check the size of a whole body that `check_fields` let pass: its containers, its values, each of its texts.

    Raises:
        RequestError: names what is too large; for a text, the field at the top that it lies in.
    """
    num_containers = num_values = 0
    fields = body.items() if isinstance(body, dict) else [("The body", body)]
    for name, field in fields:
        stack = [field]
        while stack:
            value = stack.pop()
            if isinstance(value, list | dict):
                num_containers += 1
                if num_containers > BODY_CONTAINERS:
                    raise too_many("The body", num_containers, BODY_CONTAINERS, "lists and objects or more")
                stack += value.values() if isinstance(value, dict) else value
                if isinstance(value, dict):
                    num_values += len(value)
                continue
            num_values += 1
            if isinstance(value, str) and len(value) > max_characters:
                raise too_many(f"A text of {clip(name)}", len(value), max_characters, "characters", name)
        if num_values > BODY_VALUES:
            raise too_many("The body", num_values, BODY_VALUES, "values or more")
