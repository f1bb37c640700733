"""``multipart/form-data`` (RFC 7578), as far as an upload of one file with a few fields needs it."""

from __future__ import annotations

from email.message import Message
from typing import NamedTuple

from quire.errors import RequestError


class Part(NamedTuple):
    """One field. ``filename`` None: a plain value."""

    name: str
    filename: str | None
    data: bytes


def parse_multipart(content_type: str, body: bytes) -> list[Part]:
    """Return the parts of ``body`` in order.

    Raises:
        RequestError: another media type, or a body that does not keep the form.
    """
    kind, parameters = _header_value("content-type", content_type)
    boundary = parameters.get("boundary", "")
    if kind != "multipart/form-data" or not boundary:
        raise RequestError(
            f"Content-Type {content_type[:80]!r} is not allowed here: send multipart/form-data with a boundary "
            "(curl: -F purpose=batch -F file=@lines.jsonl).",
            code="invalid_multipart",
        )
    mark = b"--" + boundary.encode("latin-1", "replace")
    sections = (b"\r\n" + body).split(b"\r\n" + mark)
    if len(sections) < 3 or not sections[-1].startswith(b"--"):
        raise _broken("it does not begin and end with its boundary")
    return [_part(section) for section in sections[1:-1]]


def _part(section: bytes) -> Part:
    head, separator, data = section.removeprefix(b"\r\n").partition(b"\r\n\r\n")
    if not separator:
        raise _broken("a part has no empty line behind its headers")
    for line in head.split(b"\r\n"):
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name.strip().lower() == "content-disposition":
            kind, parameters = _header_value("content-disposition", value.strip())
            if kind == "form-data" and parameters.get("name"):
                return Part(parameters["name"], parameters.get("filename"), data)
    raise _broken("a part has no Content-Disposition: form-data with a name")


def _header_value(name: str, value: str) -> tuple[str, dict[str, str]]:
    message = Message()
    message[name] = value.replace("\r", " ").replace("\n", " ")
    (kind, _), *rest = message.get_params([("", "")], header=name)
    return kind.lower(), {key.lower(): text for key, text in rest if isinstance(text, str)}


def _broken(why: str) -> RequestError:
    return RequestError(f"The body is not multipart/form-data: {why}.", code="invalid_multipart")
