"""`Resumption`: the stage of answers that can go on elsewhere. It is on with ``--journal`` or ``--gateway-key``.

    a gateway's headers (`quire.api.relayed`)   the stream is tagged, and may be the rest of another replica's
    Last-Event-ID, GET /v1/streams/ID           the stream is the rest of one in this server's journal
    a new stream, with a journal                it is written there

`quire.api.passage` is one such request.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from quire.api.endpoint import CallStage, Client, GenerateEndpoint, PostEndpoint, no_journal
from quire.api.journal import Entry, Journal, parse_event_id
from quire.api.passage import Passage
from quire.api.relayed import MAX_DELIVERED_BYTES, Relayed, read_relayed, resumes
from quire.api.state import ApiState
from quire.errors import RequestError
from quire.http.body import decode_body, header
from quire.http.call import AnswerName, call_of
from quire.request import SEED_BITS

# Whose streams the journal has: server-sent events.
JOURNALED = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


class Resumption(CallStage):
    """The stage. Belongs to one event loop."""

    keeps_body = True

    def __init__(self, journal: Journal | None, gateway_key: str | None) -> None:
        self.journal = journal
        self._gateway_key = gateway_key

    def has_its_place(self, scope: Scope) -> bool:
        """Whether the request is the rest of a stream: a full queue does not refuse it."""
        if self.journal is not None and header(scope, b"last-event-id") is not None:
            return True
        return resumes(scope, self._gateway_key)

    def form_bytes(self, scope: Scope) -> int:
        """Return by how much a body may be longer: a gateway's form has what was delivered beside the client's."""
        return MAX_DELIVERED_BYTES if resumes(scope, self._gateway_key) else 0

    async def run(self, endpoint: GenerateEndpoint, body: Any, client: Client) -> bool:
        """Answer a request of ``endpoint``; return True."""
        scope = client.scope
        call, last_event = call_of(scope), header(scope, b"last-event-id")
        if self.journal is not None and last_event is not None:
            entry = await self.journal.resume(call.tenant, *parse_event_id(last_event))
            try:
                decode = endpoint.state.bodies.decode
                if entry.head is None or entry.head.path != endpoint.path or (
                    body != await decode_body([entry.body], decode)
                ):  # fmt: skip
                    raise RequestError(
                        "With Last-Event-ID the request must be the one whose stream it resumes. GET "
                        f"/v1/streams/{entry.stream_id} resumes it without a body.",
                        code="another_request",
                    )
                await self.resume(endpoint, entry, body, client)
            finally:
                await self.journal.release(entry)
            return True
        relayed, body = read_relayed(call, scope, body, self._gateway_key)
        if relayed is None and self._is_journaled(endpoint.path, body):
            state = endpoint.state
            answer = AnswerName(state.new_id(), int(state.unix_time()), secrets.randbits(SEED_BITS))
            relayed = Relayed(answer, by_gateway=False)
        passage = None if relayed is None else Passage(self.journal, endpoint.path, relayed)
        await endpoint.generate(body, client, passage)
        return True

    async def resume(self, endpoint: GenerateEndpoint, entry: Entry, body: Any, client: Client) -> None:
        """Answer with the rest of a stream of the journal. ``body``: of the request that began it."""
        relayed = entry.relayed(endpoint.state.unix_time())
        passage = Passage(self.journal, endpoint.path, relayed, entry)
        await endpoint.generate(body, client, passage)

    def _is_journaled(self, path: str, body: Any) -> bool:
        is_streamed = isinstance(body, dict) and body.get("stream") is True
        return self.journal is not None and path in JOURNALED and is_streamed


class StreamEndpoint(PostEndpoint):
    """The rest of a stream of the journal, from behind ``Last-Event-ID``; without that header, the whole of it."""

    has_body = False

    def __init__(
        self, state: ApiState, resumption: Resumption, endpoints: Mapping[str, GenerateEndpoint]
    ) -> None:
        """``endpoints``: by path, those whose streams may be in the journal."""
        super().__init__(state, "/v1/streams")
        self._resumption = resumption
        self._endpoints = endpoints

    async def _run(self, body: Any, client: Client) -> None:
        scope = client.scope
        journal = self._resumption.journal
        if journal is None:
            raise no_journal()
        event = parse_event_id(header(scope, b"last-event-id") or b"0", scope["path_params"]["stream_id"])
        entry = await journal.resume(call_of(scope).tenant, *event)
        try:
            assert entry.head is not None
            endpoint = self._endpoints[entry.head.path]
            body = await decode_body([entry.body], endpoint.state.bodies.decode)
            await self._resumption.resume(endpoint, entry, body, client)
        finally:
            await journal.release(entry)
