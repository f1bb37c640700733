"""Ids of stored responses and of their items in requests and answers: opened on the way in, sealed on the way out.

Only the fields that hold such ids are read and written anew; everything else keeps its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from quire.errors import RequestError, clip
from quire_gateway.answer import AnswerStep
from quire_gateway.client_request import ClientRequest
from quire_gateway.exchange import Exchange
from quire_gateway.ownership import NAMING_PATHS, Owner, Tenancy
from quire_gateway.stage import Stage

# Of a response, of an event of its stream, of a list of items, and of what a deletion answers.
_IDS = ("id", "item_id", "response_id", "previous_response_id", "first_id", "last_id")
_OBJECTS = ("response", "item")
_LISTS = ("output", "data")
_REFERENCE = {"type", "id"}  # the fields of an item that refers to another one
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_MALFORMED = (msgspec.DecodeError, UnicodeError, RecursionError)


def opened_request(request: ClientRequest, owner: Owner) -> ClientRequest:
    """Return the request with the ids that the backend knows.

    Raises:
        RequestError: an id is not of the tenant, or the request goes on with something that has no owner here.
    """
    if request.path not in NAMING_PATHS or not owner.key:
        return request
    changed: dict[str, Any] = {}
    hint = ""
    if owner.seals and request.body.get("conversation") is not None:
        raise RequestError(
            "conversation is not supported by a gateway with several tenants: it cannot tell whose it is. Send "
            "previous_response_id, or the whole conversation as input.",
            param="conversation",
            code="unsupported_parameter",
        )
    if isinstance(previous := request.body.get("previous_response_id"), str):
        own_id = owner.open(previous)
        if own_id is None:
            raise RequestError(
                f"previous_response_id = {clip(previous)} is not stored here: it was not stored, or was deleted. Send "
                "the whole conversation as input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if own_id != previous:
            changed["previous_response_id"] = own_id
            hint = owner.hint_in(previous)
    opened = _opened_items(request.body.get("input"), owner)
    if opened:
        items = request.body["input"]
        changed["input"] = [opened.get(i, item) for i, item in enumerate(items)]
        hint = hint or next((owner.hint_in(items[i]["id"]) for i in opened if _refers(items[i])), "")
    if not changed:
        return request
    fields = _fields(request.raw)
    if "previous_response_id" in changed:
        fields["previous_response_id"] = msgspec.Raw(_encode(changed["previous_response_id"]))
    if opened:
        raw_items = _items(fields["input"])
        for i, item in opened.items():
            raw_items[i] = msgspec.Raw(_encode(_fields(raw_items[i]) | {"id": item["id"]}))
        fields["input"] = msgspec.Raw(_encode(raw_items))
    return replace(request, raw=_encode(fields), body={**request.body, **changed}, hint=hint)


def _opened_items(items: Any, owner: Owner) -> dict[int, dict[str, Any]]:
    """Return the items whose ids were sealed, by their places.

    Raises:
        RequestError: an item refers to another one that is not of the tenant.
    """
    opened: dict[int, dict[str, Any]] = {}
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if not isinstance(item, dict) or not isinstance(shown_id := item.get("id"), str):
            continue
        own_id = owner.open(shown_id)
        if own_id is None and _refers(item):
            raise RequestError(
                f"input[{i}].id = {clip(shown_id)} is not an item of a response stored here: send the item itself.",
                param=f"input[{i}]",
            )
        if own_id not in (None, shown_id):
            opened[i] = {**item, "id": own_id}
    return opened


def _refers(item: dict[str, Any]) -> bool:
    """Whether an item of a request stands for one that is stored."""
    return item.get("type") == "item_reference" or item.keys() <= _REFERENCE


class Sealed(Stage):
    """Opens the ids in requests, and seals those in answers."""

    paths = NAMING_PATHS

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy

    async def enter(self, exchange: Exchange) -> None:
        """Raises `RequestError`: an id is not of the tenant."""
        owner, before = self._tenancy.owner(exchange.call.tenant), exchange.request
        assert before is not None
        exchange.request = opened_request(before, owner)
        if owner.seals:
            exchange.answer.through(make_sealing(owner, exchange.request, before))

    def step(self, owner: Owner, shown_ids: dict[str, str], hint: str) -> Sealing:
        """Return what seals the answer to a question about a stored response."""
        return Sealing(owner, shown_ids, hint)


class Sealing(AnswerStep):
    """Seals the ids in the answer to one request."""

    def __init__(self, owner: Owner, shown_ids: dict[str, str] | None = None, hint: str = "") -> None:
        """``shown_ids``: the ids that the request named, by the backend's; ``hint``: of the backend that answers."""
        self._owner = owner
        self._shown = shown_ids or {}
        self._hint = hint

    def answered_by(self, backend: str) -> None:
        """The answer begins. One that another backend continues keeps its ids."""
        self._hint = self._owner.hint_of(backend)

    def _seal(self, own_id: str) -> str:
        return self._shown.get(own_id) or self._owner.seal(own_id, self._hint)

    def sealed_body(self, status: int, body: bytes) -> bytes:
        """Return the body of an answer as the client sees it; in an error the ids are a part of its text."""
        if status == 200:
            return _sealed(body, self._seal)
        for own_id, shown_id in self._shown.items():
            body = body.replace(own_id.encode(), shown_id.encode())
        return body

    async def document(self, status: int, content_type: str, body: bytes) -> bytes:
        return self.sealed_body(status, body)

    async def events(self, frames: bytes) -> bytes:
        return self.frames(frames)

    def frames(self, frames: bytes) -> bytes:
        """Return whole server-sent events as the client sees them."""
        if b'id"' not in frames:
            return frames
        lines = frames.split(b"\n")
        for i, line in enumerate(lines):
            if line.startswith(b"data:") and b'id"' in line:
                start = 6 if line.startswith(b"data: ") else 5
                lines[i] = line[:start] + _sealed(line[start:], self._seal)
        return b"\n".join(lines)


def make_sealing(owner: Owner, request: ClientRequest, before: ClientRequest) -> Sealing:
    """Return what seals the answer to a request, which was ``before`` until it was opened."""
    own_id, shown_id = request.body.get("previous_response_id"), before.body.get("previous_response_id")
    is_named = isinstance(own_id, str) and isinstance(shown_id, str) and bool(own_id)
    return Sealing(owner, {own_id: shown_id} if is_named else None)  # type: ignore[dict-item]


def _sealed(raw: bytes, seal: Callable[[str], str]) -> bytes:
    """Return a JSON object with sealed ids; anything else as it is: an id without a tag grants nothing."""
    try:
        fields = _fields(raw)
        return _encode(fields) if _seal_fields(fields, seal) else raw
    except _MALFORMED:
        return raw


def _seal_fields(fields: dict[str, msgspec.Raw], seal: Callable[[str], str]) -> bool:
    """Seal the ids of an object and of those in it; return whether it has any."""
    has_any = False
    for name in _IDS:
        if bytes(value := fields.get(name, msgspec.Raw()))[:1] == b'"':
            fields[name] = msgspec.Raw(_encode(seal(msgspec.json.decode(value))))
            has_any = True
    for name in _OBJECTS:
        if bytes(value := fields.get(name, msgspec.Raw()))[:1] == b"{":
            inner = _fields(value)
            if _seal_fields(inner, seal):
                fields[name] = msgspec.Raw(_encode(inner))
                has_any = True
    for name in _LISTS:
        if bytes(value := fields.get(name, msgspec.Raw()))[:1] == b"[":
            items = _items(value)
            for i, item in enumerate(items):
                if bytes(item)[:1] == b"{" and _seal_fields(inner := _fields(item), seal):
                    items[i] = msgspec.Raw(_encode(inner))
                    has_any = True
            fields[name] = msgspec.Raw(_encode(items))
    return has_any
