"""Answers of handlers in JSON, and pages of lists in OpenAI's form."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError, clip
from quire.http.wire import not_allowed


def json_response(value: object, status: int = 200) -> Response:
    """Return the JSON answer of a handler."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def list_page(request: Request, items: list[dict[str, Any]], *, default: int, most: int) -> Response:
    """Answer with one page of a list in OpenAI's form, the newest item first.

    The query has ``limit`` (``default``, at most ``most``), ``after`` (the last id of the previous page) and ``order``.

    Raises:
        RequestError: names the part of the query that is wrong.
    """
    query = request.query_params
    order, after = query.get("order", "desc"), query.get("after")
    limit = query.get("limit", str(default))
    if not limit.isascii() or not limit.isdigit() or len(limit) > 9 or not 1 <= int(limit) <= most:
        raise not_allowed("limit", limit, f"an integer in 1…{most}")
    if order not in ("asc", "desc"):
        raise not_allowed("order", order, "'asc' or 'desc'")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise RequestError(f"after = {clip(after)} is not an id of this list.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(ordered),
        }
    )
