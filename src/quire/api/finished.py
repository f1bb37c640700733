"""`FinishedUsage`: what requests of gateways have used, kept for ten minutes after their end.

A gateway that was killed has lost the answers that were on their way through it. When it starts again it asks each
replica for these records (``GET /gateway/usage``, with the gateway's key) and books what its ledger has no row of.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Send

from quire.api.relayed import TAGGED
from quire.http.account import COST_HEADER, Account, Used, UsedPage, check_gateway_key, cost_text
from quire.http.json_page import json_response

KEPT_S = 600.0
MAX_KEPT = 100_000
PAGE = 2_000


class FinishedUsage:
    """The records by the id of the gateway's row, oldest first."""

    def __init__(self, gateway_key: str | None, unix_time: Callable[[], float]) -> None:
        self._key = gateway_key
        self._unix_time = unix_time
        self._records: dict[str, Used] = {}
        self._since = unix_time()
        self._next = int(self._since * 1e6)  # above all numbers before a restart

    def put(
        self,
        account: Account | None,
        model: str,
        endpoint: str,
        tokens: tuple[int, int, int],
        seconds: float,
        cost: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Keep what a gateway's request has used.

        ``tokens``: of the prompt, those of it from the cache, output. ``cost``: engine-seconds, KV-block-seconds.
        """
        if account is None or not tokens[0]:
            return
        now, records = self._unix_time(), self._records
        records.pop(account.request_id, None)  # it came back after another replica had given it up
        names = (account.tenant, account.key, model, endpoint)
        records[account.request_id] = Used(
            self._next,
            account.request_id,
            now,
            *names,
            *tokens,
            round(1e3 * seconds, 3),
            account.ledger,
            *cost,
        )
        self._next += 1
        while len(records) > MAX_KEPT or next(iter(records.values())).finished_at < now - KEPT_S:
            del records[next(iter(records))]

    async def show(self, request: Request) -> Response:
        """The records behind the number ``after``, or the one of ``id``. ``ledger``: without those of other ledgers."""
        check_gateway_key(request.scope, self._key)
        query = request.query_params
        if "id" in query:
            hit = self._records.get(query["id"])
            return json_response(UsedPage(self._since, [hit] if hit is not None else []))
        after = query.get("after", "0")
        first = int(after) if after.isdecimal() else 0
        ledgers = (query["ledger"], "") if "ledger" in query else None
        records = [used for used in self._records.values() if used.number > first]
        those = [used for used in records if ledgers is None or used.ledger in ledgers][: PAGE + 1]
        return json_response(UsedPage(self._since, those[:PAGE], len(those) > PAGE))


def telling_cost(send: Send, account: Account | None, cost: Callable[[], tuple[float, float]]) -> Send:
    """Return a `send` that adds the cost to an answer for a gateway with a ledger; else ``send`` itself."""
    if account is None or not account.ledger:
        return send
    is_tagged = False

    async def telling(message: Message) -> None:
        nonlocal is_tagged
        if message["type"] == "http.response.start":
            names = dict(message["headers"])
            is_tagged = TAGGED in names
            if names.get(b"content-type", b"").startswith(b"application/json"):
                message["headers"] = [*message["headers"], (COST_HEADER.encode(), cost_text(*cost()))]
        elif is_tagged and not message.get("more_body", False):
            message = {**message, "body": message.get("body", b"") + b":0 0 %b\n" % cost_text(*cost())}
        await send(message)

    return telling
