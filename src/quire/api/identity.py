"""Ids and the head of answers."""

from __future__ import annotations

from typing import Any

from quire.api.replies import Head
from quire.api.state import ApiState

MAX_REQUEST_ID_CHARS = 128


def new_head(state: ApiState, prefix: str, model: str) -> Head:
    """Return the head of an answer, under an id that no other request has."""
    info = state.frontend.info
    return Head(
        id=prefix + state.new_id(),
        created=int(state.unix_time()),
        model=model,
        fingerprint=state.settings.system_fingerprint,
        determinism=info.determinism if info is not None else state.model.determinism,
    )


def usable_request_id(value: Any) -> str | None:
    """Return a client's own request id if it can stand in a header and a log line, else None."""
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if not isinstance(value, str) or not 0 < len(value) <= MAX_REQUEST_ID_CHARS:
        return None
    return value if value.isascii() and value.isprintable() else None
