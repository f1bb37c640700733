"""`quire bench serve` against a scripted server: what it sends, when it counts from, and what it makes of failures."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.bench.mock_openai import MockOpenAI

from quire.errors import ConfigError
from quire_lab.bench.args import ServeBenchArgs
from quire_lab.bench.client import StreamingClient, Target, api_url, settle
from quire_lab.bench.load import Conversation, Load, Runner
from quire_lab.bench.serve import LiveProgress, run
from quire_lab.bench.summary import RequestRecord
from quire_lab.workload.request import PromptMaker, WorkloadRequest

PROMPTS = PromptMaker(1000, seed=1, first_id=10)


def measure(
    server: MockOpenAI,
    requests: Sequence[WorkloadRequest],
    load: Load | None = None,
    endpoint: str = "completions",
    timeout_s: float = 60.0,
) -> list[RequestRecord]:
    async def go() -> list[RequestRecord]:
        client = StreamingClient(Target(server.url + "/v1", "mock", endpoint, timeout_s=timeout_s))
        try:
            return await Runner(client, PROMPTS, load or Load()).run(requests)
        finally:
            await client.close()

    return asyncio.run(go())


def ask(index: int, arrival_s: float = 0.0, num_output: int = 4, **more: object) -> WorkloadRequest:
    return WorkloadRequest(arrival_s, 9, num_output, index, **more)  # type: ignore[arg-type]


def test_what_is_sent_and_what_is_counted() -> None:
    with MockOpenAI(step_s=0.02) as server:
        (record,) = measure(server, [ask(0, 0.1, 5)])
    (body,) = server.bodies
    assert body["prompt"] == PROMPTS.token_ids(ask(0))
    assert (body["max_tokens"], body["stream"], body["ignore_eos"]) == (5, True, True)
    assert (record.status, record.num_prompt_tokens, record.num_output_tokens) == ("ok", 9, 5)
    assert record.num_cached_tokens == 3
    assert record.sent_s >= record.arrival_s
    assert record.ttft_s is not None
    assert record.ttft_s >= 0.02
    assert len(record.itl_s) == 4
    assert sum(record.itl_s) == pytest.approx(record.end_s - (record.first_token_s or 0.0))
    assert record.tpot_s is not None
    assert record.tpot_s >= 0.019


def test_without_ids_the_servers_count_is_taken() -> None:
    with MockOpenAI(lambda body: "pair", step_s=0.005) as server:
        (record,) = measure(server, [ask(0, num_output=8)])
    assert record.num_output_tokens == 8  # in four chunks
    assert len(record.itl_s) == 3


@pytest.mark.parametrize(
    ("what", "kind", "detail"),
    [
        (503, "http 503", "as scripted"),
        ("cut off", "cut off", "without a finish_reason"),
        ("error event", "error event", "boom"),
        ("empty", "empty", "no token"),
    ],
)
def test_failures_have_kinds_and_lose_nobody(what: str | int, kind: str, detail: str) -> None:
    turns = [ask(1, session="s"), ask(2, session="s", turn=1)]
    with MockOpenAI(lambda body: what if body["max_tokens"] == 4 else "ok") as server:
        fine, first, second = measure(server, [ask(0, num_output=5), *turns])
    assert fine.status == "ok"
    assert (first.status, first.error) == ("error", kind)
    assert detail in (first.detail or "")
    assert (second.error, second.detail) == ("earlier turn failed", kind)


def test_nobody_there_and_too_slow() -> None:
    with MockOpenAI(step_s=2.0) as server:
        (slow,) = measure(server, [ask(0)], timeout_s=0.2)
    (gone,) = measure(server, [ask(0)])
    assert (slow.error, gone.error) == ("timeout", "connection refused")


def test_latency_counts_from_the_intended_send_time() -> None:
    """Coordinated omission: what waits for a free connection has waited."""
    with MockOpenAI(step_s=0.03) as server:
        records = measure(server, [ask(i, num_output=2) for i in range(3)], Load(concurrency=1))
    assert server.most == 1
    waits = [(r.ttft_s or 0.0) for r in records]
    assert waits[0] < waits[1] < waits[2]
    assert waits[2] >= 5 * 0.03
    assert records[2].sent_s - records[2].arrival_s >= 4 * 0.03


def test_a_closed_loop_keeps_its_users_busy() -> None:
    with MockOpenAI(step_s=0.01) as server:
        records = measure(server, [ask(i) for i in range(9)], Load(3, closed=True))
    assert server.most == 3
    assert records[8].arrival_s > records[0].end_s


def test_a_client_that_leaves_closes_its_connection() -> None:
    with MockOpenAI(step_s=0.02) as server:
        left, stays = measure(server, [ask(0, num_output=40, cancel_after_tokens=2), ask(1, num_output=10)])
        deadline = 6000
        while not server.left and (deadline := deadline - 1):
            asyncio.run(asyncio.sleep(0.01))
        assert server.left == 1
    assert (left.status, left.num_output_tokens) == ("cancelled", 2)
    assert (stays.status, stays.num_output_tokens) == ("ok", 10)


def test_turns_of_a_chat_hold_the_real_answers() -> None:
    turns = [WorkloadRequest(0.0, 5, 2, 0, session="s"), WorkloadRequest(0.0, 10, 2, 1, session="s", turn=1)]
    with MockOpenAI() as server:
        first, second = measure(server, turns, endpoint="chat")
    said = server.bodies[1]["messages"]
    assert [m["role"] for m in said] == ["user", "assistant", "user"]
    assert said[0] == server.bodies[0]["messages"][0]
    assert said[1]["content"] == "w0 w1 "
    assert len(said[0]["content"].split()) == 5
    assert len(said[2]["content"].split()) == 3
    assert second.arrival_s >= first.end_s


def test_turns_of_ids_grow_by_their_session() -> None:
    turns = [WorkloadRequest(0.0, 5, 2, 0, session="s"), WorkloadRequest(0.0, 10, 2, 1, session="s", turn=1)]
    with MockOpenAI() as server:
        measure(server, turns)
    assert server.bodies[1]["prompt"][:5] == server.bodies[0]["prompt"]


def test_texts_of_a_trace_are_sent_as_they_are() -> None:
    turns = [ask(0, session="s", text="How?"), ask(1, session="s", turn=1, text="Why?")]
    with MockOpenAI() as server:
        measure(server, turns)
    assert [b["prompt"] for b in server.bodies] == ["How?", "How?\nw0 w1 w2 w3 \nWhy?"]


def test_fields_that_a_server_refuses_are_left_out() -> None:
    with MockOpenAI(refuses=("return_token_ids",)) as server:
        target = Target(server.url + "/v1", "mock")
        settled = asyncio.run(settle(target, lambda t: Conversation(t, PROMPTS, [ask(0)]).body(0)))
        assert set(settled.optional) == {"ignore_eos", "stream_options"}
    with (
        MockOpenAI(lambda body: 400) as server,
        pytest.raises(ConfigError, match="cannot be measured: http 400: as scripted"),
    ):
        asyncio.run(
            settle(Target(server.url + "/v1", "m"), lambda t: Conversation(t, PROMPTS, [ask(0)]).body(0))
        )


def test_a_server_that_loads_is_waited_for() -> None:
    answers = iter((503, 503, "ok"))
    with MockOpenAI(lambda body: next(answers)) as server:
        target = Target(server.url + "/v1", "mock")
        asyncio.run(settle(target, lambda t: Conversation(t, PROMPTS, [ask(0)]).body(0), ready_s=60.0))
    with MockOpenAI(lambda body: 503) as server:
        target = Target(server.url + "/v1", "mock")
        with pytest.raises(ConfigError, match="http 503"):
            asyncio.run(settle(target, lambda t: Conversation(t, PROMPTS, [ask(0)]).body(0)))


def test_the_progress_line_says_how_it_goes() -> None:
    with LiveProgress(4, "8/s") as live:
        for i in range(3):
            live.observe(ask(i))
        live.observe(RequestRecord(0, 0.0, 0.0, 1.2, 9, 5, 0.2, (0.25,) * 4))
        live.observe(RequestRecord(1, 0.0, 0.0, 1.2, 9, 0, status="error", error="timeout"))
        said = live.line(time.monotonic() + 1.0)
    assert said.startswith("1 running, ")
    assert said.endswith("TTFT 200 ms, TPOT 250.0 ms, 1 failed")


def test_urls() -> None:
    assert api_url("http://h:1") == "http://h:1/v1"
    assert api_url("https://h/api/v2/") == "https://h/api/v2"
    for bad in ("h:1", "ftp://h", ""):
        with pytest.raises(ConfigError, match="--url"):
            api_url(bad)


def test_the_command_writes_its_files(tmp_path: Path) -> None:
    out, lines, page = (str(tmp_path / n) for n in ("a.json", "a.jsonl", "a.html"))
    with MockOpenAI(step_s=0.002) as server:
        flags = ServeBenchArgs(
            url=server.url, limit=12, rate=200.0, input_len="uniform:5,9", output_len="4", slo="ttft=5s",
            cancel=0.3, json=out, jsonl=lines, html=page,
        )  # fmt: skip
        assert run(flags) == 0
    summary = json.loads(Path(out).read_text())
    assert summary["num_completed"] + summary["num_cancelled"] == 12
    assert summary["goodput_per_s"] == summary["requests_per_s"]
    assert set(summary["ttft_ms"]) == {"mean", "p50", "p90", "p95", "p99"}
    assert summary["run"]["loop"] == "open"
    assert len([json.loads(line) for line in Path(lines).read_text().splitlines()]) == 12
    html = Path(page).read_text()
    assert html.count("<svg") == 6
    assert "<script" not in html


def test_the_servers_context_decides_which_rows_fit(tmp_path: Path) -> None:
    trace, out = tmp_path / "t.csv", str(tmp_path / "a.json")
    trace.write_text(
        "num_prefill_tokens,num_decode_tokens\n" + "".join(f"{n},4\n" for n in (5, 200, 96, 97, 6))
    )
    with MockOpenAI() as server:
        assert run(ServeBenchArgs(url=server.url, trace=str(trace), json=out)) == 0
        found = json.loads(Path(out).read_text())
        assert (found["num_completed"], found["refused_rows"]) == (3, {"longer than the context": 2})
        assert run(ServeBenchArgs(url=server.url, model="other", trace=str(trace), limit=2, json=out)) == 0
    assert json.loads(Path(out).read_text())["num_refused_rows"] == 0


def test_a_sweep_finds_a_knee(tmp_path: Path) -> None:
    out = str(tmp_path / "a.json")
    with MockOpenAI(step_s=0.01) as server:
        # Two at a time and 40 ms each: 50 requests a second at most.
        flags = ServeBenchArgs(
            url=server.url, limit=6, rate=25.0, concurrency=2, input_len="5", output_len="4",
            slo="ttft=60ms", sweep=True, json=out,
        )  # fmt: skip
        assert run(flags) == 0
    found = json.loads(Path(out).read_text())
    assert len(found["sweep"]) >= 3
    assert found["knee_per_s"] in [p["offered_per_s"] for p in found["sweep"]]
    assert found["goodput_per_s"] <= 55


def test_nothing_to_measure_is_one_line() -> None:
    command = [sys.executable, "-m", "quire.cli", "bench", "serve", "--url", "http://127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is the server up" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "flags",
    [
        {"slo": "ttft=5"},
        {"burstiness": 2.0},
        {"time_scale": 2.0},
        {"trace": "/none.csv"},
        {"input_len": "x"},
        {"extra_body": "[1]"},
        {"extra_body": "{"},
        {"rate": -1.0},
        {"url": "nowhere"},
    ],
)
def test_wrong_flags_are_refused(flags: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        run(ServeBenchArgs(model="m", **flags))  # type: ignore[arg-type]
