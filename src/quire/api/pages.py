"""Lists a page at a time, as OpenAI's are."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.body import json_response
from quire.api.fields import clip
from quire.errors import RequestError


def page_of(request: Request, items: list[dict[str, Any]], *, default: int, most: int) -> Response:
    """A page of a list, the newest first: ``limit``, ``after`` (the last id of the page before), ``order``."""
    query = request.query_params
    order, after = query.get("order", "desc"), query.get("after")
    limit_text = query.get("limit", str(default))
    if not limit_text.isascii() or not limit_text.isdigit() or not 1 <= int(limit_text) <= most:
        raise RequestError(
            f"limit = {clip(limit_text)} is not allowed: it must be an integer in 1…{most}.", param="limit"
        )
    if order not in ("asc", "desc"):
        raise RequestError(
            f"order = {clip(order)} is not allowed: it must be 'asc' or 'desc'.", param="order"
        )
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise RequestError(f"after = {clip(after)} is no id of this list.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit_text)]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(ordered),
        }
    )
