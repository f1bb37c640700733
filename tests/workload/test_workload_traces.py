"""Readers of traces: what each format gives, what is refused and counted, and the real files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire_lab.workload.build import from_trace
from quire_lab.workload.distributions import Arrivals
from quire_lab.workload.traces import Trace, estimate_tokens, parse_trace, read_trace

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n"
    "2023-11-16 18:15:51.0000000,12,0\n"
    "yesterday,12,4\n"
    "2023-11-16 18:15:52,many,4\n"
)


def test_azure_rows_keep_seven_digits_of_the_second() -> None:
    trace = parse_trace(AZURE, "azure")
    assert (trace.format, trace.timed) == ("azure", True)
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in trace.rows] == [(374, 44), (396, 109)]
    assert trace.rows[1].arrival_s - trace.rows[0].arrival_s == pytest.approx(4.314579, abs=1e-6)
    assert trace.refused == {
        "no output tokens": 1,
        "TIMESTAMP is not a time": 1,
        "ContextTokens is not a number": 1,
    }


def test_azure_of_2024_writes_a_time_zone() -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.5+00:00,1,1\n2024-05-10 00:00:02+00:00,1,1\n"
    rows = parse_trace(text, "azure").rows
    assert rows[1].arrival_s - rows[0].arrival_s == 1.5


def test_mooncake_hashes_cover_the_prompt() -> None:
    lines = [
        {"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]},
        {"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0]},
        {"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, None]},
    ]
    trace = parse_trace("\n".join([*map(json.dumps, lines), "{broken", "[1]"]), "m")
    (row,) = trace.rows
    assert (row.arrival_s, row.hash_ids, row.hash_block_size) == (1.5, (0, 7), 512)
    assert trace.refused == {
        "hash_ids does not fit the prompt's length": 1,
        "hash_ids is not a list of ids": 1,
        "not a JSON object": 2,
    }


def test_rtp_llm_hashes_cover_full_blocks_only() -> None:
    row = {"ts": 56, "il": 2100, "ol": 3, "bh": ["9", "12"], "shard": 1}
    (request,) = parse_trace(json.dumps(row), "r").rows
    assert (request.arrival_s, request.hash_ids, request.hash_block_size) == (0.056, ("9", "12"), 1024)


@pytest.mark.parametrize("whole", [False, True])
def test_a_conversation_is_a_session_of_turns(whole: bool) -> None:
    said = [
        ("system", "Be brief."),
        ("human", "a" * 31),
        ("gpt", "b" * 40),
        ("human", "c" * 8),
        ("gpt", "d" * 4),
    ]
    rows = [
        {"id": "x", "conversations": [{"from": who, "value": text} for who, text in said]},
        {"id": "y", "conversations": [{"from": "human", "value": "no answer"}]},
        {"id": "z", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    ][: 2 if whole else 3]
    trace = parse_trace(json.dumps(rows) if whole else "\n".join(map(json.dumps, rows)), "s")
    first, second = trace.rows[:2]
    assert (first.session, first.turn, first.text) == ("x", 0, "Be brief.\n" + "a" * 31)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (estimate_tokens(first.text), 10)
    assert (second.turn, second.text) == (1, "c" * 8)
    assert second.num_prompt_tokens == first.num_prompt_tokens + 10 + 2
    assert trace.refused["no question with an answer"] == 1


def test_a_later_row_may_use_the_other_key_of_the_same_kind() -> None:
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {"messages": "hi"},
    ]
    trace = parse_trace("\n".join(map(json.dumps, rows)), "s")
    assert len(trace.rows) == 1
    assert trace.refused == {"conversation is not a list of messages": 1}


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.gz", tmp_path / "b.csv"
    plain.write_text(AZURE)
    packed.write_bytes(gzip.compress(AZURE.encode()))
    assert read_trace(plain).rows == read_trace(packed).rows


def test_what_is_no_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of its 1 rows is of a known format"):
        parse_trace("a,b\n1,2\n", "x")
    with pytest.raises(ConfigError, match="known format"):
        parse_trace("", "x")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(AZURE.encode())[:40])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "cut.gz")


def test_limit_counts_rows_that_fit() -> None:
    trace = parse_trace(
        "num_prefill_tokens,num_decode_tokens\n" + "".join(f"{n},1\n" for n in (9, 1, 9, 2, 3)), "x"
    )
    workload = from_trace(
        trace, limit=2, max_model_len=8, arrivals=Arrivals(rate=2.0, burstiness=float("inf"))
    )
    assert [r.num_prompt_tokens for r in workload.requests] == [1, 2]
    assert [r.arrival_s for r in workload.requests] == [0.0, 0.5]
    assert workload.refused == {"longer than the context": 2}
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.68,1,{}\n" * 4
    mixed = parse_trace(rows.format(0, 1, 0, 0), "x")
    assert from_trace(mixed).refused == {"no output tokens": 3}
    mixed = parse_trace(rows.format(0, 1, 1, 0), "x")
    assert from_trace(mixed, limit=1).refused == {"no output tokens": 1}
    with pytest.raises(ConfigError, match="no row is left"):
        from_trace(trace, max_model_len=1)


def test_time_scale_stretches_and_order_is_kept() -> None:
    workload = from_trace(parse_trace(AZURE, "azure"), time_scale=2.0)
    assert [r.arrival_s for r in workload.requests] == [0.0, pytest.approx(8.629158, abs=2e-6)]
    assert [r.index for r in workload.requests] == [0, 1]
    assert sum(workload.refused.values()) == 3


@pytest.mark.parametrize(
    ("name", "kind", "rows", "refused"),
    [
        ("azure_llm_2023_code.csv.gz", "azure", 5291, {}),
        ("azure_llm_2023_conv.csv.gz", "azure", 11619, {}),
        ("arxiv_summarization_lengths.csv.gz", "lengths", 16954, {}),
        ("mooncake_conversation.jsonl.gz", "mooncake", 7218, {}),
        ("mooncake_synthetic.jsonl.gz", "mooncake", 2395, {}),
        ("rtp_llm_online_30min.jsonl.gz", "rtp-llm", 3050, {"no output tokens": 1949}),
    ],
)
def test_real_traces(shared_data: Path, name: str, kind: str, rows: int, refused: dict[str, int]) -> None:
    trace: Trace = read_trace(shared_data / "traces" / name)
    assert (trace.format, len(trace.rows), trace.refused) == (kind, rows, refused)
    assert trace.timed == (kind != "lengths")
