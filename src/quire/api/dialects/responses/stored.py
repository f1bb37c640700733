"""Stored responses: `StoredResponses` shows, deletes and cancels them."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.api.dialects.responses.answer import ResponseAnswer
from quire.api.dialects.responses.store import Stored
from quire.api.generation import Generation
from quire.api.state import ApiState
from quire.errors import NotFoundError, RequestError, clip
from quire.http.call import Call, call_of
from quire.http.json_page import json_response, list_page


class StoredResponses:
    """``/v1/responses/{id}``: GET and DELETE, its ``input_items``, and ``POST …/cancel``."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def one(self, request: Request) -> Response:
        """Return a stored response, or delete it.

        Raises:
            NotFoundError: an id that is not stored.
            RequestError: a query that would change the answer.
        """
        response_id, call = request.path_params["response_id"], call_of(request.scope)
        if request.method == "DELETE":
            if not self._state.responses.delete(call.tenant, response_id):
                raise _not_found(response_id)
            deleted = {"id": response_id, "object": "response", "deleted": True}
            return json_response(deleted)
        if request.query_params.get("stream", "false") != "false":
            raise RequestError(
                "stream is not supported here: send stream = true with the request itself.", param="stream"
            )
        pending = pending_response(self._state, call, response_id)
        if pending is None:
            return Response(self._stored(call, response_id).response, media_type="application/json")
        assert isinstance(pending.job.answer, ResponseAnswer)
        has_tokens = pending.usage.completion_tokens > 0
        return json_response(pending.job.answer.begun("in_progress" if has_tokens else "queued"))

    async def input_items(self, request: Request) -> Response:
        """Return a page of the items of a response's own input.

        Raises:
            NotFoundError: an id that is not stored.
            RequestError: a query that is wrong.
        """
        response_id, call = request.path_params["response_id"], call_of(request.scope)
        pending = pending_response(self._state, call, response_id)
        if pending is None:
            items = msgspec.json.decode(self._stored(call, response_id).input_items)
        else:
            assert isinstance(pending.job.answer, ResponseAnswer)
            items = pending.job.answer.input_items
        return list_page(request, items, default=20, most=100)

    async def cancel(self, request: Request) -> Response:
        """Return a background response that has ended; `BackgroundResponses` ends one that is running before this.

        Raises:
            NotFoundError: an id that is not stored.
            RequestError: it was not a background response.
        """
        response_id = request.path_params["response_id"]
        stored = self._stored(call_of(request.scope), response_id).response
        if not msgspec.json.decode(stored)["background"]:
            raise RequestError(
                f"{response_id} is complete. Only background responses can be cancelled; close the "
                "connection of another.",
                param="response_id",
            )
        return Response(stored, media_type="application/json")

    def _stored(self, call: Call, response_id: str) -> Stored:
        stored = self._state.responses.get(call.tenant, response_id)
        if stored is None:
            raise _not_found(response_id)
        return stored


def _not_found(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"The response {clip(response_id)} is not stored here.",
        param="response_id",
        code="response_not_found",
    )


def pending_response(state: ApiState, call: Call, response_id: str) -> Generation | None:
    """Return the background response of this id if it is still running."""
    for request in state.running.named(response_id):
        if isinstance(request, Generation) and request.job.in_background:
            return request if request.job.owner == call.tenant else None
    return None
