"""Traces of real services, gzip or not; the format is detected from the fields.

    azure       CSV    TIMESTAMP, ContextTokens, GeneratedTokens (Patel et al., Splitwise, ISCA 2024)
    lengths     CSV    num_prefill_tokens, num_decode_tokens; no times
    mooncake    JSONL  timestamp in ms, input_length, output_length, hash_ids of 512 tokens each (Qin et al., FAST 2025)
    rtp-llm     JSONL  ts in ms, il, ol, bh: a hash per full block of 1024 tokens
    sharegpt    JSONL or one JSON list: conversations [{from, value}] or messages [{role, content}]; no times

A row that cannot be a request (no output, broken JSON …) is refused and counted by reason, never dropped silently.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire_lab.workload.request import WorkloadRequest

MOONCAKE_BLOCK_TOKENS = 512
RTP_BLOCK_TOKENS = 1024
_USER, _MODEL = ("human", "user"), ("gpt", "assistant", "model", "chatgpt", "bing", "bard")
_FORMATS = "azure CSV, num_prefill_tokens CSV, Mooncake, rtp-llm or ShareGPT-like JSONL"


@dataclass(frozen=True, slots=True)
class Trace:
    """The rows of one file in order. `quire_lab.workload.build.from_trace` makes a workload of them."""

    name: str
    format: str  # azure, lengths, mooncake, rtp-llm or sharegpt
    # ``arrival_s`` as in the file, 0 where it has no times; ``index``: row number.
    rows: tuple[WorkloadRequest, ...]
    refusals: tuple[tuple[int, str], ...]  # (row number, reason)
    timed: bool  # whether the file says when requests arrived

    @property
    def refused(self) -> dict[str, int]:
        """Reason → rows."""
        return dict(Counter(reason for _, reason in self.refusals))


class RefusedRow(Exception):
    """This row cannot be a request; the text is the reason under which it is counted."""


def estimate_tokens(text: str) -> int:
    """Return roughly how many tokens an English text has without a tokenizer: one per four characters."""
    return max(1, math.ceil(len(text) / 4))


def read_trace(path: str | Path, count_tokens: Callable[[str], int] = estimate_tokens) -> Trace:
    """Read a trace file. ``count_tokens`` measures the texts of a ShareGPT-like one.

    Raises:
        ConfigError: the file cannot be read, or has none of the formats.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise ConfigError(f"trace {path}: cannot be read ({error})") from error
    return parse_trace(data.decode("utf-8-sig", errors="replace"), path.name, count_tokens)


def parse_trace(text: str, name: str, count_tokens: Callable[[str], int] = estimate_tokens) -> Trace:
    """Parse the text of a trace; ``name`` is for messages."""
    start = text.lstrip()[:1]
    if start in ("{", "["):
        records = _json_records(text, start)
    else:
        records = iter(csv.DictReader(io.StringIO(text)))
    refusals: list[tuple[int, str]] = []
    rows: list[WorkloadRequest] = []
    row_format: _Format | None = None
    for number, record in enumerate(records):
        try:
            if not isinstance(record, dict):
                raise RefusedRow("not a JSON object")
            row_format = row_format or _detect(record)
            if row_format is None:
                raise RefusedRow("unknown fields")
            rows += (replace(r, index=number) for r in row_format.rows(record, number, count_tokens))
        except RefusedRow as reason:
            refusals.append((number, str(reason)))
    if row_format is None:
        raise ConfigError(f"trace {name}: none of its {len(refusals)} rows is of a known format: {_FORMATS}")
    return Trace(name, row_format.name, tuple(rows), tuple(refusals), row_format.timed)


def _json_records(text: str, start: str) -> Iterator[Any]:
    if start == "[":
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if isinstance(value, list):
            yield from value
            return
    for line in text.splitlines():
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError:
                yield None


Rows = Callable[[dict[str, Any], int, Callable[[str], int]], Iterable[WorkloadRequest]]


@dataclass(frozen=True, slots=True)
class _Format:
    name: str
    fields: frozenset[str]  # fields in every row of this format
    timed: bool
    rows: Rows


def _detect(record: Mapping[str, Any]) -> _Format | None:
    return next((f for f in _KNOWN if f.fields <= record.keys()), None)


def _azure(row: dict[str, Any], number: int, count: Callable[[str], int]) -> list[WorkloadRequest]:
    return [_request(_timestamp(row), _count(row, "ContextTokens"), _count(row, "GeneratedTokens"))]


def _lengths(row: dict[str, Any], number: int, count: Callable[[str], int]) -> list[WorkloadRequest]:
    return [_request(0.0, _count(row, "num_prefill_tokens"), _count(row, "num_decode_tokens"))]


def _mooncake(row: dict[str, Any], number: int, count: Callable[[str], int]) -> list[WorkloadRequest]:
    num_prompt = _count(row, "input_length")
    hashes = _hashes(row, "hash_ids", math.ceil(num_prompt / MOONCAKE_BLOCK_TOKENS))
    time_s, num_output = _ms(row, "timestamp"), _count(row, "output_length")
    return [_request(time_s, num_prompt, num_output, hashes, MOONCAKE_BLOCK_TOKENS)]


def _rtp(row: dict[str, Any], number: int, count: Callable[[str], int]) -> list[WorkloadRequest]:
    num_prompt = _count(row, "il")
    hashes = _hashes(row, "bh", num_prompt // RTP_BLOCK_TOKENS)
    return [_request(_ms(row, "ts"), num_prompt, _count(row, "ol"), hashes, RTP_BLOCK_TOKENS)]


def _sharegpt(row: dict[str, Any], number: int, count: Callable[[str], int]) -> list[WorkloadRequest]:
    """Return each question with an answer as a turn of one session; its prompt is the conversation before."""
    turns = _turns(row.get("conversations") or row.get("messages"))
    session, context, requests = str(row.get("id", f"row {number}")), 0, []
    for turn, (question, answer) in enumerate(turns):
        num_prompt, num_output = context + count(question), count(answer)
        made = WorkloadRequest(0.0, num_prompt, num_output, session=session, turn=turn, text=question)
        requests.append(made)
        context = made.num_tokens
    return requests


def _turns(conversation: Any) -> list[tuple[str, str]]:
    if not isinstance(conversation, list) or not all(isinstance(part, dict) for part in conversation):
        raise RefusedRow("conversation is not a list of messages")
    turns: list[tuple[str, str]] = []
    question = ""
    for part in conversation:
        role, text = part.get("from", part.get("role")), part.get("value", part.get("content"))
        if not isinstance(text, str):
            raise RefusedRow("message without text")
        if role in _MODEL:
            if question and text:
                turns.append((question, text))
            question = ""
        else:  # a system message goes in front of the first question
            question = f"{question}\n{text}".strip()
    if not turns:
        raise RefusedRow("no question with an answer")
    return turns


_KNOWN = (
    _Format("azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), True, _azure),
    _Format("lengths", frozenset({"num_prefill_tokens", "num_decode_tokens"}), False, _lengths),
    _Format(
        "mooncake", frozenset({"timestamp", "input_length", "output_length", "hash_ids"}), True, _mooncake
    ),
    _Format("rtp-llm", frozenset({"ts", "il", "ol", "bh"}), True, _rtp),
    _Format("sharegpt", frozenset({"conversations"}), False, _sharegpt),
    _Format("sharegpt", frozenset({"messages"}), False, _sharegpt),
)


def _request(
    time_s: float, num_prompt: int, num_output: int, hashes: tuple[int | str, ...] = (), block_size: int = 0
) -> WorkloadRequest:
    if num_prompt < 1:
        raise RefusedRow("no prompt tokens")
    if num_output < 1:
        raise RefusedRow("no output tokens")
    return WorkloadRequest(time_s, num_prompt, num_output, hash_ids=hashes, hash_block_size=block_size)


def _number(row: Mapping[str, Any], key: str) -> float:
    try:
        value = float(row[key])
    except (KeyError, TypeError, ValueError):
        raise RefusedRow(f"{key} is not a number") from None
    if isinstance(row[key], bool) or not math.isfinite(value):
        raise RefusedRow(f"{key} is not a number")
    return value


def _count(row: Mapping[str, Any], key: str) -> int:
    value = _number(row, key)
    if value < 0 or value != int(value):
        raise RefusedRow(f"{key} is not a count")
    return int(value)


def _ms(row: Mapping[str, Any], key: str) -> float:
    return _number(row, key) / 1e3


def _timestamp(row: Mapping[str, Any]) -> float:
    """``2023-11-16 18:15:46.6805900`` as seconds: whole seconds and fraction apart, which keeps all seven digits."""
    seconds, _, fraction = str(row.get("TIMESTAMP")).partition(".")
    digits = fraction[:-6] if fraction[-6:-5] in ("+", "-") else fraction.rstrip("Z")
    try:
        base = datetime.fromisoformat(seconds)
        base_s = (base - datetime(1970, 1, 1, tzinfo=base.tzinfo)).total_seconds()
        return base_s + (float(f"0.{digits}") if digits else 0.0)
    except ValueError:
        raise RefusedRow("TIMESTAMP is not a time") from None


def _hashes(row: Mapping[str, Any], key: str, num: int) -> tuple[int | str, ...]:
    hashes = row.get(key)
    if not isinstance(hashes, list) or not all(type(h) in (int, str) for h in hashes):
        raise RefusedRow(f"{key} is not a list of ids")
    if len(hashes) != num:
        raise RefusedRow(f"{key} does not fit the prompt's length")
    return tuple(hashes)
