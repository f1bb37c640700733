"""Bodies that once held the API process, by name: (path, media type, body), made when asked for: some have 31 MB."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

JSON = "application/json"
MIB = 2**20
Attack = tuple[str, str, bytes]


def completion(**fields: Any) -> Attack:
    return "/v1/completions", JSON, json.dumps({"prompt": "hi", "max_tokens": 1, **fields}).encode()


def chat(**fields: Any) -> Attack:
    turn = {"role": "user", "content": "hi"}
    return "/v1/chat/completions", JSON, json.dumps({"messages": [turn], "max_tokens": 1, **fields}).encode()


def words(num_bytes: int) -> str:
    return ("the quick brown fox jumps over it " * (num_bytes // 34 + 1))[:num_bytes]


def raw(path: str, before: bytes, piece: bytes, num_bytes: int, after: bytes) -> Attack:
    return path, JSON, before + piece * (num_bytes // len(piece)) + after


def multipart(head: str, num_parts: int) -> Attack:
    part = f"--b\r\ncontent-disposition: form-data; {head}\r\n\r\nx\r\n".encode()
    return "/v1/files", "multipart/form-data; boundary=b", part * num_parts + b"--b--\r\n"


def header_parameters(num: int) -> Attack:
    extra = "; ".join(f'p{i}="x"' for i in range(num))
    return multipart(f'name="file"; filename="a.jsonl"; {extra}', 1)


ATTACKS: dict[str, Callable[[], Attack]] = {
    "words_1mb": lambda: completion(prompt=words(10**6)),
    "words_4mb": lambda: completion(prompt=words(4 * 10**6)),
    "words_12mib": lambda: completion(prompt=words(12 * MIB)),
    "words_31mb": lambda: completion(prompt=words(31 * 10**6)),
    "one_long_word_31mb": lambda: completion(prompt="a" * (31 * 10**6)),
    "tokenize_4mb": lambda: ("/tokenize", JSON, json.dumps({"prompt": words(4 * 10**6)}).encode()),
    "tokenize_31mb": lambda: ("/tokenize", JSON, json.dumps({"prompt": words(31 * 10**6)}).encode()),
    "chat_words_31mb": lambda: chat(messages=[{"role": "user", "content": words(31 * 10**6)}]),
    "many_messages": lambda: chat(messages=[{"role": "user", "content": "x"}] * 600_000),
    "bad_words_100k": lambda: completion(bad_words=[f"w{i}" for i in range(100_000)]),
    "stop_1m": lambda: completion(stop=[f"s{i}" for i in range(10**6)]),
    "logit_bias_1m": lambda: completion(logit_bias={str(i): 1 for i in range(10**6)}),
    "detokenize_1m": lambda: ("/detokenize", JSON, json.dumps({"tokens": [5] * 10**6}).encode()),
    "prompt_ids_6m": lambda: completion(prompt=[5] * (6 * 10**6)),
    "prompts_1m": lambda: completion(prompt=["hi"] * 10**6),
    "embed_texts_2m": lambda: ("/v1/embeddings", JSON, json.dumps({"input": ["hi"] * (2 * 10**6)}).encode()),
    "rerank_2m": lambda: (
        "/v1/rerank", JSON, json.dumps({"query": "a", "documents": ["b"] * (2 * 10**6)}).encode()),
    "tools_100k": lambda: chat(
        tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(100_000)]),
    "empty_lists_10m": lambda: raw("/v1/completions", b'{"prompt":[', b"[],", 30 * 10**6, b"[]]}"),
    "empty_objects_1mb": lambda: raw("/v1/completions", b'{"prompt":[', b"{},", 10**6, b"{}]}"),
    "nested_lists_31mb": lambda: raw("/v1/completions", b'{"prompt":', b"[", 31 * 10**6, b""),
    "nested_objects_31mb": lambda: raw("/v1/completions", b'{"prompt":', b'{"a":', 31 * 10**6, b""),
    "unknown_keys_31mb": lambda: ("/v1/completions", JSON, json.dumps({f"k{i}": 1 for i in range(2_300_000)}).encode()),
    "ints_15m": lambda: raw("/v1/completions", b'{"metadata":[', b"1,", 31 * 10**6, b"1]}"),
    "escapes_31mb": lambda: raw("/v1/completions", b'{"prompt":"', rb"\u00e9", 31 * 10**6, b'"}'),
    "not_json_31mb": lambda: raw("/v1/completions", b"", b"x", 31 * 10**6, b""),
    "spaces_31mb": lambda: raw("/v1/completions", b"", b" ", 31 * 10**6, b"{}"),
    "header_parameters_100k": lambda: header_parameters(100_000),
    "parts_100k": lambda: multipart('name="purpose"', 100_000),
    "schema_31mb": lambda: chat(
        guided_json={"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700_000)}}),
}  # fmt: skip
