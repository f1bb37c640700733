"""Choices of ``/v1/chat/completions``: message and deltas, with content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from quire.api.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from quire.api.tools import OutputPlan
from quire.engine.output import OutputChunk
from quire.request import FinishReason, TokenLogprobs
from quire.text.output import CallDelta, ContentDelta, Delta

_encode = msgspec.json.Encoder().encode


class Message:
    """One answer taken apart while it comes: its parser, and the calls so far."""

    def __init__(self, plan: OutputPlan, new_id: Callable[[], str]) -> None:
        self._plan = plan
        self._parser = plan.parser()
        self._new_id = new_id

    @property
    def num_calls(self) -> int:
        return min(self._parser.num_calls, self._plan.max_calls or self._parser.num_calls)

    def delta(self, text: str, *, last: bool) -> dict[str, Any]:
        """The ``delta`` object of more text; empty where it says nothing yet."""
        deltas = self._parser.feed(text) if text else []
        if last:
            deltas += self._parser.finish()
        said: dict[str, Any] = {}
        for delta in deltas:
            self._add(said, delta)
        return said

    def _add(self, said: dict[str, Any], delta: Delta) -> None:
        if isinstance(delta, CallDelta):
            if delta.call < (self._plan.max_calls or delta.call + 1):
                said.setdefault("tool_calls", []).append(self._call(delta))
        elif isinstance(delta, ContentDelta):
            said["content"] = said.get("content", "") + delta.text
        elif self._plan.with_reasoning:
            # vLLM's newer name and the older one of DeepSeek, SGLang and earlier vLLM.
            for name in ("reasoning", "reasoning_content"):
                said[name] = said.get(name, "") + delta.text

    def _call(self, delta: CallDelta) -> dict[str, Any]:
        if delta.name is None:
            return {"index": delta.call, "function": {"arguments": delta.arguments}}
        return {
            "index": delta.call,
            "id": delta.id or "call_" + self._new_id()[:24],
            "type": "function",
            "function": {"name": delta.name, "arguments": delta.arguments},
        }


def merge_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a whole message, as a client of the stream does."""
    for name, value in delta.items():
        if name != "tool_calls":
            message[name] = (message.get(name) or "") + value
            continue
        calls = message.setdefault("tool_calls", [])
        for part in value:
            if "id" in part:
                calls.append({**part, "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


@dataclass(slots=True)
class ChatChoices:
    """``plan`` None: the answer is content as it comes."""

    kind: ClassVar = "chat.completion"
    chunk_kind: ClassVar = "chat.completion.chunk"
    id_prefix: ClassVar = "chatcmpl-"

    names: TokenNames
    with_logprobs: bool
    with_ids: bool
    num_prompt_logprobs: int | None
    plan: OutputPlan | None
    new_id: Callable[[], str]
    _messages: dict[int, Message] = field(default_factory=dict)

    def opening(self, index: int, echo: str) -> bytes | None:
        """The chunk that names the role, before any content; chats are not echoed."""
        return (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % index
        )

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        """The choice object of one chunk; None when there is nothing to say yet."""
        last = chunk.finish_reason is not None
        if self.plan is not None:
            said = self._message(index).delta(chunk.text, last=last)
            if not said and not last and not self.with_logprobs and not self.with_ids:
                return None
        elif not last and not self.with_logprobs and not self.with_ids:
            if not chunk.text:
                return None
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                index,
                _encode(chunk.text),
            )
        else:
            said = {"content": chunk.text} if chunk.text or not last else {}
        value: dict[str, Any] = {
            "index": index,
            "delta": said,
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": self._finish(index, chunk.finish_reason),
        }
        if last:
            value["stop_reason"] = chunk.stop_reason
        if self.with_ids:
            value["token_ids"] = chunk.token_ids
        return _encode(value)

    def whole(self, index: int, chunk: OutputChunk, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """The choice object of a whole answer, given as one chunk."""
        message: dict[str, Any] = {"role": "assistant", "content": chunk.text, "refusal": None}
        if self.plan is not None:
            message["content"] = None
            merge_message(message, self._message(index).delta(chunk.text, last=True))
            for call in message.get("tool_calls", ()):
                del call["index"]
            if message["content"] is None and "tool_calls" not in message:
                message["content"] = ""
        value: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": self._finish(index, chunk.finish_reason),
            "stop_reason": chunk.stop_reason,
        }
        if self.with_ids:
            value["token_ids"] = chunk.token_ids
        return value

    def beside(self, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Fields beside ``choices``, in a whole answer and in the first chunk."""
        return {"prompt_token_ids": prompt_token_ids} if self.with_ids else {}

    def scored(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        """More fields beside ``choices``: with the first chunk of the first choice, the prompt's log-probabilities."""
        if index or chunk.prompt_logprobs is None or self.num_prompt_logprobs is None:
            return {}
        entries = prompt_logprobs(chunk.prompt_logprobs, self.num_prompt_logprobs, self.names)
        return {"prompt_logprobs": entries}

    def _message(self, index: int) -> Message:
        assert self.plan is not None
        message = self._messages.get(index)
        if message is None:
            message = self._messages[index] = Message(self.plan, self.new_id)
        return message

    def _finish(self, index: int, reason: FinishReason | None) -> str | None:
        if reason is FinishReason.STOP and self.plan is not None and self._message(index).num_calls:
            return "tool_calls"
        return reason

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return chat_logprobs(logprobs or (), self.names) if self.with_logprobs else None
