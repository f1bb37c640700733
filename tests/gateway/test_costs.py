"""What a request has used of the engine, from its replica into the ledger; and which answers met the SLO."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tests.api.asgi_client import Api
from tests.gateway.live import Received, Scripted, answer, begin_stream, chunk, frame, gateway
from tests.gateway.test_billing import streams, text
from tests.gateway.test_tenants import rows

from quire.errors import ConfigError
from quire.http.account import COST_HEADER, Account, cost_of, ledger_header
from quire.slo import Slo
from quire_gateway.answer import Answer
from quire_gateway.catalog import Target
from quire_gateway.config_file import gateway_config
from quire_gateway.exchange import Exchange
from quire_gateway.migrate import Continuation, Groups
from quire_gateway.quotas import Usage as Reserved
from quire_gateway.usage import Usage
from quire_gateway.used import meets

KEY = "between-us"
LEDGER = "a" * 32


def ask(
    folder: Path, backend: Scripted, body: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], Any, str]:
    """Ask once; return the sums of the ledger, the answer's headers, and the metrics."""

    async def main() -> tuple[Any, str]:
        named = {"ledger": str(folder / "ledger.sqlite"), "gateway_key": KEY, **settings}
        async with gateway(backend, **named) as live:
            assert (await live.post(body))[0] == 200
            await live.until(lambda: live.state.num_open == 0)
            return live.headers, live.state.metrics.exposition("")[0].decode()

    headers, metrics = asyncio.run(asyncio.wait_for(main(), 60))
    return rows(folder)["ok"], headers, metrics


def test_a_whole_answers_cost_is_in_its_row(tmp_path: Path) -> None:
    async def replica(request: Received, writer: asyncio.StreamWriter) -> None:
        assert len(request.headers["x-quire-ledger"]) == 32
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        body = json.dumps(text("ab", usage=usage)).encode()
        await answer(writer, 200, body, {COST_HEADER: "0.125000 3.500000"})

    backend = Scripted(replica, card={"fingerprint": "f"})
    line, headers, metrics = ask(tmp_path, backend, {"model": "m", "prompt": "hi"})
    assert (line["engine_s"], line["kv_block_s"], COST_HEADER in headers) == (0.125, 3.5, False)
    assert 'quire:gateway_tenant_engine_seconds_total{tenant=""} 0.125' in metrics
    assert 'quire:gateway_tenant_kv_block_seconds_total{tenant=""} 3.5' in metrics


def test_a_tagged_streams_cost_is_in_its_row(tmp_path: Path) -> None:
    events = [frame(text("ab")), frame(text("", usage={"prompt_tokens": 5, "completion_tokens": 2}))]

    async def replica(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer, {"x-quire-tagged": "f"})
        await chunk(writer, b":%d [0,[1,2],0]\n%b" % (len(events[0]), events[0]))
        await chunk(writer, b":%d 0\n%b:0 0 0.250000 7.000000\n" % (len(events[1]), events[1]))
        await chunk(writer, b"")

    backend = Scripted(replica, card={"fingerprint": "f"})
    line = ask(tmp_path, backend, {"model": "m", "prompt": "hi", "stream": True})[0]
    assert (line["engine_s"], line["kv_block_s"], line["output_tokens"]) == (0.25, 7.0, 2)


def test_groups_read_a_cost_behind_the_end() -> None:
    continuation = Continuation("0" * 32, 1, 2)
    groups = Groups(continuation)
    assert groups.feed(b":4 0\nabcd:0 0 1.5") == b"abcd"
    assert groups.feed(b"00000 2.000000\n") == b""
    assert (groups.end(), continuation.cost) == (b"", (1.5, 2.0))


@pytest.mark.parametrize("said", ["", "1", "1 2 3", "nan 1", "-1 0", "inf 0", "a b"])
def test_a_wrong_cost_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=r"convert|unpack|no cost"):
        cost_of(said)


@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_tells_a_gateway_with_a_ledger_alone(stream: bool) -> None:
    api = Api(gateway_key=KEY)
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "stream": stream}
    key = {"x-quire-gateway-key": KEY, "x-quire-answer": f"{'0' * 32} 1 2"}
    account = key | dict(Account("row-1").headers())
    for headers, tells in (({}, False), (account, False), (account | dict(ledger_header(LEDGER)), True)):
        found = api.post("/v1/completions", body, headers=headers)
        assert found.status_code == 200
        last = found.content.rsplit(b"\n", 2)[-2] if stream else found.headers.get(COST_HEADER, "").encode()
        assert (last.startswith(b":0 0 ") if stream else bool(last)) == tells
        if tells:
            assert len(cost_of(last.removeprefix(b":0 0 ").decode())) == 2


def exchange(**values: Any) -> Exchange:
    made = Exchange({"type": "http", "headers": []}, Answer(None), "r", 100.0)  # type: ignore[arg-type]
    made.attempts.backend, made.attempts.target = object(), Target("m")  # type: ignore[assignment]
    made.reserved, made.usage = Reserved(1, 100), Usage(5, 0, 11)
    owners = {"first_s": made.answer, "backend": made.attempts}
    for name, value in values.items():
        setattr(owners.get(name, made), name, value)
    return made


SLO = Slo(ttft_s=0.5, tpot_s=0.1, e2el_s=2.0)


@pytest.mark.parametrize(
    ("values", "end_s", "expected"),
    [
        ({"first_s": 100.5}, 101.5, True),  # 0.5 s, then ten gaps of 0.1 s
        ({"first_s": 100.51}, 101.5, False),
        ({"first_s": 100.5}, 101.51, False),
        ({"first_s": 100.4, "outcome": "broken"}, 101.0, False),
        ({}, 101.5, True),  # whole: TTFT and ten TPOT
        ({}, 101.51, False),
        ({"outcome": "refused"}, 100.1, False),
        ({"backend": None}, 100.1, False),
    ],
)
def test_an_answer_meets_every_latency_or_not(values: dict[str, Any], end_s: float, expected: bool) -> None:
    assert meets(SLO, exchange(**values), end_s) == expected


def test_goodput_is_counted_by_tenant_and_key(tmp_path: Path) -> None:
    script = streams(text("a"), text("b", usage={"prompt_tokens": 5, "completion_tokens": 2}))
    body = {"model": "m", "prompt": "hi", "stream": True}
    for number, (slo, expected) in enumerate((("ttft=60s,tpot=60s", 1), ("ttft=60s,e2el=1us", 0), (None, 0))):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = {} if slo is None else {"slo": slo}
        line, _, metrics = ask(folder, Scripted(script), body, **settings)
        assert (line["met_slo"], line["goodput"] > 0) == (expected, bool(expected))
        assert f'quire:gateway_tenant_slo_met_total{{key="",tenant=""}} {expected}.0' in metrics


def test_a_wrong_slo_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="config: slo = ttft = 'fast' must be a time"):
        gateway_config({"slo": "ttft=fast"})
