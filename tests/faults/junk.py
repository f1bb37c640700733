"""Requests that are wrong, extreme or odd, and some that are fine: all drawn from one `Random`."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.api.test_api_extremes import ENDPOINTS, FIELDS, FLOATS, INSIDE, INTEGERS, STRINGS, raw_of
from tests.api.test_api_fuzz import junk

JSON = "application/json"
SCALARS = [*INTEGERS, *FLOATS, *STRINGS, True, None, [], {}]
TURN = {"role": "user", "content": "hi"}
FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
PART = {"type": "text", "text": "t"}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Valid bodies with much in them, of which one thing is changed.
RICH: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {
        "model": "quill", "messages": [{"role": "system", "content": "s"}, TURN,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "1"}, {"role": "user", "content": [PART]}],
        "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto", "max_tokens": 3, "n": 2,
        "logprobs": True, "top_logprobs": 2, "stop": ["x"], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {
        "messages": [TURN], "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}),
    ("/v1/completions", {
        "model": "warm", "prompt": ["hi", "there"], "max_tokens": 4, "n": 2, "best_of": 2, "echo": True, "logprobs": 2,
        "seed": 3, "logit_bias": {"5": 1.5}, "presence_penalty": 0.1, "repetition_penalty": 1.1, "suffix": None}),
    ("/v1/completions", {
        "prompt": [1, 2, 3], "max_tokens": 3, "stop_token_ids": [7], "bad_words": ["x"], "min_tokens": 1,
        "structured_outputs": {"regex": "[ab]{1,3}"}, "ignore_eos": True, "prompt_logprobs": 1}),
    ("/v1/responses", {
        "model": "quill", "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"}], "instructions": "i", "max_output_tokens": 3,
        "tools": [{"type": "function", **FUNCTION}], "text": {"format": {"type": "text"}}, "metadata": {"a": "b"},
        "stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    ("/v1/messages", {
        "model": "quill", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "messages": [
        {"role": "user", "content": [{"type": "text", "text": "t"}]}, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": "1"}]}], "stream": True, "stop_sequences": ["x"],
        "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}], "tool_choice": {"type": "auto"}}),
    ("/v1/embeddings", {"model": "quill", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": True}),
    ("/v1/score", {"text_1": ["a"], "text_2": ["b", "c"]}),
    ("/tokenize", {"prompt": "hi there", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": [TURN], "add_generation_prompt": True, "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/chat/completions/render", {"messages": [TURN], "tools": [{"type": "function", "function": FUNCTION}]}),
    ("/v1/messages/count_tokens", {"messages": [TURN], "system": "s"}),
    ("/v1/responses/input_tokens", {"input": "hi", "instructions": "i"}),
    ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}),
]  # fmt: skip
SHORT = {"prompt": "x", "max_tokens": 1}
LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": SHORT})
FORM = (
    '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    f'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{LINE}\r\n--b--\r\n'
).encode()
PATHS = (
    "/v1/models/{}", "/v1/responses/{}", "/v1/responses/{}/input_items", "/v1/files/{}", "/v1/files/{}/content",
    "/v1/batches/{}", "/v1/batches/{}/cancel", "/v1/responses/{}/cancel", "/{}", "/v1/{}", "/v1/files?limit={}",
    "/v1/batches?after={}&limit=-1", "/livez", "/readyz", "/metrics", "/props", "/slots", "/v1/models", "/openapi.json",
)  # fmt: skip
# Values in range, at their edges, of which several at once may contradict each other.
EDGES: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1e-9, 0.7, 100), "top_p": (5e-324, 1e-9, 0.5, 1), "top_k": (-1, 0, 1, 2**31), "min_p": (0, 1.0),
    "typical_p": (1e-9, 1), "seed": (-(2**63), -1, 0, 2**63 - 1), "n": (1, 2, 3, 16), "best_of": (1, 2, 3),
    "logprobs": (0, 1, 20), "prompt_logprobs": (0, 1, 20), "echo": (True,), "min_tokens": (0, 1, 3, 200),
    "max_tokens": (0, 1, 2, 4, None), "stop": ("a", [" ", "e"], ["\ud800"]),
    "stop_token_ids": ([5], [0, 7], [2**31 - 1]), "bad_words": ([" the"], ["a", "b"], ["\n"]),
    "allowed_token_ids": ([5], [0], [5, 6, 7], [10**6]),
    "logit_bias": ({"5": -100}, {"5": 100}, {"1000000": 1}, {"0": 0}), "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2), "repetition_penalty": (1e-6, 1e6, 2), "ignore_eos": (True, False),
    "use_beam_search": (True, False), "length_penalty": (-100, 0, 2.0), "early_stopping": (True, "never"),
    "structured_outputs": (
        {"regex": "a*"}, {"choice": ["a"]}, {"json": {"type": "integer"}}, {"grammar": 'start: "a"'}),
    "guided_choice": (["a", "b"], [""], ["\ud800"]), "guided_regex": ("", "[^a]", "(", "a{0,100000}"),
    "response_format": (
        {"type": "json_object"}, {"type": "text"}, {"type": "json_schema", "json_schema": {"schema": {}}}),
    "truncate_prompt_tokens": (1, -1, 5), "thinking_token_budget": (0, 1), "cache_salt": ("s",), "priority": (-5, 5),
    "timing": (True,), "add_special_tokens": (False,), "skip_special_tokens": (False,), "stream": (True, True, False),
    "stream_options": ({"include_usage": True},), "return_token_ids": (True,), "include_stop_str_in_output": (True,),
    "tool_choice": ("none", "required", "auto"), "tools": ([{"type": "function", "function": FUNCTION}],),
    "continue_final_message": (True,), "add_generation_prompt": (False,), "suffix": ("x",), "model": ("warm", "quill"),
    "prompt": ("", "hi", [0], [5] * 255, ["a", "b"], [[1], [2]], "a" * 2000), "background": (True,),
    "store": (False,), "deadline_ms": (0.001, 50, {"first_token": 1e-9}, {"total": 10_000}), "pooling": ("mean",),
    "dimensions": (1, 64, 65),
    "top_logprobs": (0, 20), "max_completion_tokens": (1, 3), "max_output_tokens": (1, 3), "top_n": (0, 1, 99),
}  # fmt: skip
TYPES = (JSON, "text/plain", "", "application/json; charset=utf-16", "multipart/form-data", "x" * 300)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    kind: str
    method: str
    path: str
    media_type: str
    body: bytes


def request_of(rng: Random) -> Asked:
    """Draw a request. Two of three have a wrong or extreme value, and few generate more than four tokens."""
    kind = rng.choices(
        ("extreme", "changed", "edges", "corrupt", "junk", "form", "path", "large", "valid"),
        (30, 22, 20, 7, 8, 4, 4, 0.1, 5),
    )[0]
    if kind == "path":
        text = rng.choice(("%00", "..%2f..%2fetc", "file-1", "%ff", "a" * 3000, "resp_0", "%F0%9F%99%82"))
        return Asked(
            kind, rng.choice(("GET", "GET", "POST", "DELETE", "PUT")), rng.choice(PATHS).format(text), "", b""
        )
    if kind == "form":
        boundary = rng.choice(("b", "b", "b", "", "b" * 71, "\x00"))
        return Asked(
            kind, "POST", "/v1/files", f"multipart/form-data; boundary={boundary}", corrupt(FORM, rng)
        )
    if kind == "large":
        piece = rng.choice((b"[],", b'"a",', b"1,", b"{},", b"null,"))
        body = b'{"prompt":[' + piece * (1_200_000 // len(piece)) + b'"x"],"max_tokens":1}'
        return Asked(kind, "POST", rng.choice(("/v1/completions", "/tokenize")), JSON, body)
    path, body = _body_of(kind, rng)
    raw = raw_of(tame(body, rng))
    if kind == "corrupt":
        return Asked(kind, "POST", path, rng.choice(TYPES) if rng.random() < 0.2 else JSON, corrupt(raw, rng))
    return Asked(kind, "POST", path, JSON, raw)


def _body_of(kind: str, rng: Random) -> tuple[str, Any]:
    if kind in ("extreme", "junk"):
        path, name = rng.choice(FIELDS)
        body = dict(ENDPOINTS[path][1])
        for field in (name, *([rng.choice(FIELDS)[1]] if rng.random() < 0.3 else [])):
            value = junk(rng) if kind == "junk" else extreme(rng)
            body[field] = INSIDE[field](value) if field in INSIDE and rng.random() < 0.6 else value
        if rng.random() < 0.4:
            body.setdefault("stream", True)
        return path, body
    if kind == "edges":
        path, name = rng.choice(FIELDS)
        fields = [name, *rng.sample(sorted(EDGES), rng.randrange(1, 4))]
        known = {field for at, field in FIELDS if at == path}
        return path, ENDPOINTS[path][1] | {
            f: rng.choice(EDGES[f]) for f in fields if f in known & EDGES.keys()
        }
    path, rich = rng.choice(RICH)
    return path, changed(copy.deepcopy(rich), rng) if kind == "changed" else rich


def extreme(rng: Random) -> Any:
    kind = rng.random()
    if kind < 0.7:
        return rng.choice(SCALARS)
    if kind < 0.85:
        return [rng.choice(SCALARS) for _ in range(rng.randrange(3))]
    return {rng.choice(("5", "9" * 4301, "-1", "", "\ud800", "type")): rng.choice(SCALARS)}


def changed(value: Any, rng: Random) -> Any:
    """Return ``value`` with one thing in it replaced, removed, added or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.92:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            del value[key]
        elif rng.random() < 0.05:
            value[rng.choice(STRINGS)] = extreme(rng)
        else:
            value[key] = changed(value[key], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        new = changed(copy.deepcopy(value[at]), rng)
        return [*value[:at], new, *value[at + (rng.random() < 0.8) :]]
    return extreme(rng) if rng.random() < 0.7 else junk(rng)


def corrupt(data: bytes, rng: Random) -> bytes:
    """Return ``data`` with bytes changed, removed, repeated or cut off."""
    kind, at = rng.randrange(5), rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind == 1:
        end = rng.randrange(at, len(data))
        return data[:at] + data[end:]
    if kind == 2:
        return data[:at] + data[at // 2 : at] * rng.randrange(1, 4) + data[at:]
    made = bytearray(data)
    for _ in range(rng.randrange(1, 9)):
        made[rng.randrange(len(made))] = rng.choice((0, 255, 34, 92, 123, 91, rng.randrange(256)))
    return bytes(made)


def tame(body: Any, rng: Random) -> Any:
    """Keep the answers short: a length above four is one of four tokens, but in one body of two hundred."""
    if isinstance(body, dict) and rng.random() > 0.005:
        for name in LENGTHS:
            if isinstance(body.get(name), int) and not isinstance(body[name], bool) and body[name] > 4:
                body[name] = 1 + body[name] % 4 if rng.random() < 0.7 else body[name]
    return body
