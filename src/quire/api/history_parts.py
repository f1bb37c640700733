"""Parts of a message that are no plain text, as text: what a client sends back is never refused.

A history may hold what another server or an earlier model made of it: refusals, thinking, documents, references to
tools, images in results. Their text stands in the prompt or, where they have none, one line that says what stood there.
In the newest message of the user a part without text is refused: the answer would be about something that the model
cannot see.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote_to_bytes

from quire.errors import RequestError, clip
from quire.http.call import Call, cache_salt
from quire.http.limits import NAME_CHARS

if TYPE_CHECKING:
    from quire.api.images import Sight  # loaded with a model that takes images alone
    from quire.api.state import ApiState

THOUGHTS = ("thinking", "reasoning", "redacted_thinking")
_NAMES = {
    "image": "image", "image_url": "image", "input_image": "image", "audio": "audio", "audio_url": "audio",
    "input_audio": "audio", "video": "video", "video_url": "video", "document": "document", "file": "file",
    "input_file": "file",
}  # fmt: skip
_MAX_NESTED = 8


class PartText(NamedTuple):
    """The text of a part. ``is_thought``: it belongs to the reasoning of an earlier answer."""

    text: str
    is_thought: bool = False


def part_text(part: Mapping[str, Any], where: str, *, newest: bool) -> PartText:
    """Return the text of a part that is not plain text, or the line that stands for it.

    ``newest``: it is of the newest message of the user. ``where``: its path, for the error.

    Raises:
        RequestError: ``newest``, and the part has no text.
    """
    kind = str(part.get("type"))
    text = _own_text(part, kind)
    if text is not None:
        return PartText(text, kind in THOUGHTS)
    if newest:
        raise RequestError(
            f"{where} is a part of type {clip(kind)} in the newest message of the user, but the model is text only: it "
            "cannot see what the answer would be about. Send its text (a part of type text), or choose another model.",
            param=where,
            code="unsupported_content",
        )
    return PartText(_line(part, kind))


def _own_text(part: Mapping[str, Any], kind: str, nested: int = 0) -> str | None:
    """Return the text that a part has; None if it has none."""
    if nested > _MAX_NESTED:
        return None
    if kind == "redacted_thinking":  # encrypted: no template can read it
        return ""
    if kind == "tool_reference":
        return f"[tool: {_short(part.get('tool_name') or part.get('name') or 'unnamed')}]"
    if kind in ("document", "search_result", "file", "input_file"):
        return _document(part, nested)
    for key in () if kind in _NAMES else (kind, "text", "refusal", "thinking", "content", "summary"):
        text = _joined(part.get(key), nested)
        if text is not None:
            return text
    return None


def _document(part: Mapping[str, Any], nested: int) -> str | None:
    """Return a document's title and text."""
    inner: Any = part.get("file") if isinstance(part.get("file"), dict) else part
    source = inner.get("source")
    text = _joined(inner.get("content"), nested)
    if isinstance(source, dict):
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            text = source["data"]
        elif source.get("type") == "content":
            text = _joined(source.get("content"), nested)
        elif str(source.get("media_type")).startswith("text/"):
            text = _decoded(f"data:text/plain;base64,{source.get('data')}")
    data = inner.get("file_data")
    if text is None and isinstance(data, str):
        text = _decoded(data)
    if text is None:
        return None
    titles = [inner.get("title") or inner.get("filename"), source if isinstance(source, str) else None]
    return "\n".join([_short(title) for title in titles if isinstance(title, str) and title] + [text])


def _joined(value: Any, nested: int) -> str | None:
    """Return a string, or the texts of a list of parts; None if it has none."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        return None
    texts = []
    for item in value:
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, dict):
            kind = str(item.get("type"))
            text = item.get("text")
            own = text if isinstance(text, str) else _own_text(item, kind, nested + 1)
            texts.append(_line(item, kind) if own is None else own)
    return "\n".join(texts)


def _decoded(url: str) -> str | None:
    """Return the text of a ``data:`` URL whose type is text."""
    head, comma, data = url.partition(",")
    if not comma or not head.startswith(("data:text/", "data:application/json")):
        return None
    try:
        raw = base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
        return raw.decode()
    except (binascii.Error, ValueError):
        return None


def _line(part: Mapping[str, Any], kind: str) -> str:
    """Return the line that says what stood there."""
    if kind in _NAMES:
        inner = part.get("file") if isinstance(part.get("file"), dict) else part
        assert isinstance(inner, Mapping)
        name = inner.get("filename") or inner.get("title")
        called = f" {_short(name)}" if isinstance(name, str) and name else ""
        return f"[{_NAMES[kind]}{called}: the model is text only and cannot see it]"
    beside = {key: part[key] for key in ("name", "input", "action", "query", "url") if part.get(key)}
    details = f": {_short(json.dumps(beside, ensure_ascii=False, default=str))}" if beside else ""
    return f"[{_short(kind)}{details}]"


def _short(value: Any) -> str:
    """Return the value on one line, without its end if it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= NAME_CHARS else text[: NAME_CHARS - 1] + "…"


def sight_of(state: ApiState, call: Call, request: Any) -> Sight | None:
    """Return what reads the images of ``request``, a body as a typed value; None if the model takes none."""
    if state.model.vision is None:
        return None
    salt = cache_salt(call.salt_group, getattr(request, "cache_salt", ""))
    made: Sight = import_module("quire.api.images").Sight(salt)
    return made


def content_of(
    content: str | list[Any], where: str, role: str, sight: Sight | None, text_of: Callable[..., str]
) -> str | list[dict[str, Any]]:
    """Return a content as a chat template reads it: its text, or its parts if some are images that ``sight`` reads."""
    seen = None if sight is None else sight.parts(content, where, role, text_of)
    return text_of(content, where) if seen is None else seen


def add_shown(messages: list[dict[str, Any]], shown: str | dict[str, Any]) -> None:
    """Append a text or the part of an image to the last message, if it is the user's, or as a new one of the user."""
    part = {"type": "text", "text": shown} if isinstance(shown, str) else shown
    last = messages[-1] if messages and messages[-1]["role"] == "user" else None
    if last is None:
        messages.append({"role": "user", "content": shown if isinstance(shown, str) else [part]})
    elif isinstance(last["content"], str) and isinstance(shown, str):
        last["content"] += "\n" + shown
    elif isinstance(last["content"], str):
        last["content"] = [{"type": "text", "text": last["content"]}, part]
    else:
        last["content"].append(part)


def newest_index(messages: Sequence[Any], *, kinds: tuple[Any, ...] = (None,)) -> int:
    """Return the index of the last message of the user, -1 without one. ``kinds``: the types that messages have."""
    for i in range(len(messages) - 1, -1, -1):
        one = messages[i]
        if isinstance(one, dict) and one.get("role") == "user" and one.get("type") in kinds:
            return i
    return -1
