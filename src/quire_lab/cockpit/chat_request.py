"""What the chat page asks for, and what it shows of an answer's chunks. No page is in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire_lab.cockpit.watched import Failed

SAMPLING: dict[str, tuple[str, float, float, float, float]] = {  # label, default, low, high, step
    "temperature": ("Temperature", 0.8, 0.0, 2.0, 0.05),
    "top_p": ("top_p", 1.0, 0.05, 1.0, 0.01),
    "top_k": ("top_k, 0: off", 0, 0, 200, 1),
    "min_p": ("min_p", 0.0, 0.0, 1.0, 0.01),
    "max_tokens": ("Tokens at most", 128, 1, 4096, 1),
}
FORMS = {"text": "Text", "json_object": "JSON", "json_schema": "JSON schema", "regex": "Regular expression"}
_MIN_RATE_MS = 10.0  # tokens that came together say nothing about a rate
STOPPED = "stopped"  # stopped by the reader; not a reason of the API
_REASONS = {
    "stop": "ended by itself",
    "length": "cut",
    "tool_calls": "calls tools",
    "content_filter": "ended by a filter",
    STOPPED: "stopped by you",
}


@dataclass(slots=True)
class Talk:
    """What the page keeps of a browser between two visits to the chat. ``id`` names the conversation in the browser."""

    id: str = ""
    settings: dict[str, Any] = field(default_factory=lambda: {name: row[1] for name, row in SAMPLING.items()})
    models: list[str] = field(default_factory=list)  # one per pane
    turns: list[list[dict[str, Any]]] = field(default_factory=lambda: [[], []])  # messages, per pane
    is_double: bool = False
    is_by_token: bool = False
    seed: int | None = None
    system: str = ""
    tools: str = ""
    form: str = "text"
    form_text: str = ""


def body_of(talk: Talk, model: str, turns: list[dict[str, Any]], *, goes_on: bool = False) -> dict[str, Any]:
    """Return the request. ``goes_on``: the answer continues the last turn.

    Raises:
        Failed: tools or a schema are no JSON.
    """
    system = [{"role": "system", "content": talk.system}] if talk.system.strip() else []
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    body: dict[str, Any] = {
        "model": model,
        "messages": [*system, *messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "timing": True,
        **{
            name: int(value) if name in ("top_k", "max_tokens") else value
            for name, value in talk.settings.items()
            if value is not None  # a field that was emptied
        },
    }
    if goes_on:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if talk.seed is not None:
        body["seed"] = int(talk.seed)
    if talk.is_by_token:
        body |= {"logprobs": True, "top_logprobs": 20}
    if talk.tools.strip():
        body["tools"] = _json(talk.tools, "Tools")
    if talk.form == "json_object":
        body["response_format"] = {"type": "json_object"}
    elif talk.form == "json_schema":
        schema = _json(talk.form_text, "The schema")
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    elif talk.form == "regex":
        body["structured_outputs"] = {"regex": talk.form_text}
    return body


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise Failed(f"{what}: no JSON ({error}).") from None


def chunk_event(chunk: dict[str, Any]) -> dict[str, Any]:
    """Return what the browser draws of a chunk of a stream; ``finish``: why the answer has ended."""
    event: dict[str, Any] = {}
    if "error" in chunk:
        event["error"] = chunk["error"].get("message", "failed")
    for choice in chunk.get("choices", ())[:1]:
        delta = choice.get("delta") or {}
        event["finish"] = choice.get("finish_reason")
        event["text"] = delta.get("content") or ""
        event["think"] = delta.get("reasoning") or delta.get("reasoning_content") or ""
        event["calls"] = [
            {"index": call.get("index", 0), **(call.get("function") or {})}
            for call in delta.get("tool_calls") or ()
        ]
        tokens = (choice.get("logprobs") or {}).get("content") or ()
        if tokens and not event["think"] and not event["calls"]:
            event["tokens"] = [
                {
                    "token": one["token"],
                    "text": one["token"],
                    "logprob": one["logprob"],
                    "top": [
                        {"token": top["token"], "logprob": top["logprob"]} for top in one["top_logprobs"]
                    ],
                }
                for one in tokens
            ]
    return {key: value for key, value in event.items() if value}


def end_of(talk: Talk, turn: dict[str, Any]) -> dict[str, Any]:
    """Return how the page shows that an answer has ended.

    ``turn`` has the answer's ``finish``, its ``max_tokens`` and ``num_tokens`` where they are known. An answer in a
    form cannot go on: its grammar would begin anew.
    """
    finish = turn.get("finish") or "failed"
    text = _REASONS.get(finish, finish)
    if finish == "length":
        limit, num_tokens = turn.get("max_tokens"), turn.get("num_tokens")
        is_full = limit is not None and num_tokens is not None and num_tokens < limit
        at_limit = "cut" if limit is None else f"cut at max_tokens = {limit}"
        text = "cut: the model's context is full" if is_full else at_limit
        if not turn["content"]:
            text += ", before its text began"
    is_cut = finish in ("length", STOPPED)
    can_go_on = is_cut and bool(turn["content"]) and talk.form == "text" and "full" not in text
    return {"text": text, "reason": finish, "is_cut": is_cut, "can_go_on": can_go_on}


def bar_of(timing: dict[str, Any], seen_ms: float, usage: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a request's time in ms, and facts; ``seen_ms``: as the page's process measured it whole."""
    total, first = timing.get("total_ms") or seen_ms, timing.get("first_token_ms") or 0.0
    queued = timing.get("queued_ms") or 0.0
    num_tokens = timing.get("completion_tokens") or usage.get("completion_tokens") or 0
    decode = max(0.0, total - first)
    facts = [["tokens", str(num_tokens)]]
    if decode >= _MIN_RATE_MS and num_tokens > 1:
        facts.append(["tokens/s", f"{1000 * (num_tokens - 1) / decode:.1f}"])
    for key, name in (
        ("prompt_tokens", "prompt"), ("cached_tokens", "cached"), ("chunks", "chunks"), ("steps", "steps"),
        ("accepted_drafts", "accepted drafts"), ("preemptions", "preemptions"), ("seed", "seed"),
    ):  # fmt: skip
        if timing.get(key) is not None and (timing[key] or key in ("cached_tokens",)):
            facts.append([name, str(timing[key])])
    return {
        "queue": queued,
        "prefill": max(0.0, first - queued),
        "decode": decode,
        "network": max(0.0, seen_ms - total),
        "facts": facts,
    }
