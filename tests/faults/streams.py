"""Thirty-two streams of every kind that a fault must not change: what is asked, and what of an answer has to be equal.

Every request has a seed, so an undisturbed run gives the same tokens. Compared are text, ids, log-probabilities, calls,
finish reasons and usage; left out are ids and times of the answer, how its text was cut into events, and how much of
the prompt was found in the cache.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

NUM_TOKENS = 160
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 200, "maxLength": 240}},
    "required": ["city"],
    "additionalProperties": False,
}
NUMBERS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 999},
    "minItems": 60,
    "maxItems": 60,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TURN = {"role": "user", "content": "Tell me a long story about a fox."}
LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0.9}
IDS = {"return_token_ids": True, "stream_options": {"include_usage": True}}
CHAT = {"messages": [TURN], **LONG, **IDS}
PROMPT = "Once upon a time there was a fox who"
# Kind → path and body.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/completions", {"prompt": PROMPT, **LONG, **IDS, "logprobs": 2}),
    "n": ("/v1/completions", {"prompt": PROMPT, **LONG, **IDS, "n": 3, "logprobs": 1}),
    "chat": ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "schema": ("/v1/chat/completions", {
        "messages": [TURN], "max_tokens": 2 * NUM_TOKENS, **IDS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}}}),
    "tools": ("/v1/chat/completions", {
        "messages": [TURN], "max_tokens": 2 * NUM_TOKENS, **IDS, "tools": [TOOL], "tool_choice": "required"}),
    "lora": ("/v1/completions", {"prompt": PROMPT, **LONG, **IDS, "model": "warm", "logprobs": 1}),
    "responses": ("/v1/responses", {
        "input": TURN["content"], "max_output_tokens": 2 * NUM_TOKENS, "temperature": 0.9,
        "text": {"format": {"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": True}}}),
    "messages": ("/v1/messages", {
        "messages": [TURN], "max_tokens": 2 * NUM_TOKENS, "temperature": 0.9, "tool_choice": {"type": "any"},
        "tools": [{"name": "weather", "input_schema": PARAMETERS}]}),
    "regex": ("/v1/completions", {"prompt": PROMPT, "max_tokens": NUM_TOKENS, **IDS,
        "structured_outputs": {"regex": "[a-z ]{400,500}"}}),
    "greedy": ("/v1/completions", {"prompt": PROMPT * 20, **LONG, **IDS, "temperature": 0}),
    "penalties": ("/v1/completions", {
        "prompt": PROMPT, **LONG, **IDS, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "top_p": 0.9,
        "min_p": 0.02, "stop": ["\n\n\n"], "logit_bias": {"30": 2.0}}),
    "adapter chat": ("/v1/chat/completions", {**CHAT, "model": "warm", "n": 2}),
}  # fmt: skip


@dataclass(slots=True)
class Outcome:
    """One stream: what its client got. ``content`` is None where it was not an answer."""

    kind: str
    status: int = 0
    content: Any = None
    num_missing: int = 0  # terminal events that did not come, or came twice
    error: str | None = None


@dataclass(slots=True)
class Ask:
    """One stream to ask for."""

    kind: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)


def mixed(count: int, first_seed: int = 0, kinds: tuple[str, ...] = tuple(KINDS)) -> list[Ask]:
    """Return ``count`` streams, of all kinds in turn, each with a seed of its own."""
    made = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        path, body = KINDS[kind]
        made.append(Ask(kind, path, {"model": "quill", **body, "seed": first_seed + i, "stream": True}))
    return made


class Streams:
    """Asks for streams while the block does something to the server; `outcomes` waits for their ends."""

    def __init__(self, url: str, asks: list[Ask]) -> None:
        self._url, self._asks = url, asks
        self.num_pieces = 0  # reads of all streams so far
        self.num_open = len(asks)

    async def __aenter__(self) -> Streams:
        limits = aiohttp.ClientTimeout(total=300)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limits)
        self._tasks = [asyncio.create_task(self._one(ask)) for ask in self._asks]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def reached(self, num_pieces: int) -> int:
        """Wait until so many pieces came, or half of the streams have ended; return how many are open."""
        while self.num_pieces < num_pieces and self.num_open > len(self._asks) // 2:
            await asyncio.sleep(0.005)
        return self.num_open

    async def outcomes(self) -> list[Outcome]:
        return list(await asyncio.gather(*self._tasks))

    async def _one(self, ask: Ask) -> Outcome:
        outcome, raw = Outcome(ask.kind), b""
        try:
            async with self._session.post(self._url + ask.path, json=ask.body) as answer:
                outcome.status = answer.status
                async for piece in answer.content.iter_any():
                    raw += piece
                    self.num_pieces += 1
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        self.num_open -= 1
        _read(ask, outcome, raw)
        return outcome


def _read(ask: Ask, outcome: Outcome, raw: bytes) -> None:
    if outcome.status != 200:
        outcome.error = outcome.error or raw[:300].decode(errors="replace")
        outcome.num_missing = int(outcome.error is None or not raw)
        return
    lines = [line[6:] for line in raw.decode().split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if ask.path == "/v1/responses":
        outcome.content, outcome.num_missing = _of_responses(events)
    elif ask.path == "/v1/messages":
        outcome.content, outcome.num_missing = _of_messages(events)
    else:
        outcome.content, missing = _of_choices(events, ask.body.get("n", 1))
        outcome.num_missing = missing + abs(lines.count("[DONE]") - 1)


def _of_choices(events: list[dict[str, Any]], n: int) -> tuple[Any, int]:
    """Return what a chat or a completion has of each choice, and how many finish reasons are missing or too many."""
    choices: dict[int, dict[str, Any]] = {i: {"finish": []} for i in range(n)}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            got = choices.setdefault(choice["index"], {"finish": []})
            for name in ("text", "token_ids"):
                if choice.get(name):
                    got[name] = got[name] + choice[name] if name in got else choice[name]
            delta = choice.get("delta") or {}
            for name in ("content", "reasoning_content", "reasoning", "refusal"):
                if delta.get(name):
                    got[name] = got.get(name, "") + delta[name]
            for call in delta.get("tool_calls") or ():
                made = got.setdefault(f"call {call['index']}", [])
                made += [call["function"].get("name") or ""] if call["function"].get("name") else []
                got[f"arguments {call['index']}"] = got.get(f"arguments {call['index']}", "") + (
                    call["function"].get("arguments") or ""
                )
            for name, values in (choice.get("logprobs") or {}).items():
                got.setdefault(f"logprobs {name}", []).extend(values or [])
            got["finish"] += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return (choices, _anonymous(usage)), sum(len(got["finish"]) != 1 for got in choices.values())


def _of_responses(events: list[dict[str, Any]]) -> tuple[Any, int]:
    ends = [
        e for e in events if e["type"] in ("response.completed", "response.incomplete", "response.failed")
    ]
    deltas: Counter[str] = Counter()
    texts: dict[str, str] = {}
    for event in events:
        deltas[event["type"]] += 1
        if isinstance(event.get("delta"), str):
            key = f"{event['type']} {event.get('output_index')}"
            texts[key] = texts.get(key, "") + event["delta"]
    kept = {name: count for name, count in deltas.items() if not name.endswith(".delta")}
    return ([_anonymous(end["response"]) for end in ends], texts, kept), abs(len(ends) - 1)


def _of_messages(events: list[dict[str, Any]]) -> tuple[Any, int]:
    texts: dict[str, str] = {}
    ends: list[Any] = []
    for event in events:
        if event["type"] == "content_block_delta":
            kind = event["delta"]["type"]
            value = (
                event["delta"].get("text")
                or event["delta"].get("partial_json")
                or event["delta"].get("thinking")
            )
            texts[f"{event['index']} {kind}"] = texts.get(f"{event['index']} {kind}", "") + (value or "")
        elif event["type"] in ("message_delta", "error"):
            usage = event.get("usage") or {}
            num_input = sum(value for name, value in usage.items() if "input_tokens" in name)
            ends.append((event.get("delta"), num_input, usage.get("output_tokens"), event.get("error")))
    return (texts, ends), abs(sum(e["type"] == "message_stop" for e in events) - 1)


_OWN = {
    "id", "created_at", "completed_at", "call_id", "item_id", "request_id", "prompt_tokens_details",
    "input_tokens_details",
}  # fmt: skip


def _anonymous(value: Any) -> Any:
    """Return an answer without ids, times and cached tokens."""
    if isinstance(value, dict):
        return {name: _anonymous(each) for name, each in value.items() if name not in _OWN}
    return [_anonymous(each) for each in value] if isinstance(value, list) else value
