"""Answers of ``/v1/responses``: a response with output items, whole or as OpenAI's numbered events.

response.created response.in_progress
(response.output_item.added … response.output_item.done)*     one item per part of the answer
response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import msgspec

from quire.api.assembler import Assembler, Event, Kind, Part
from quire.api.dialects.responses.tools import ResponseTools, custom_tool_input
from quire.api.generation import CANCELLED_BY_CLIENT
from quire.api.job import Answer, Head, Usage
from quire.api.output_plan import OutputPlan
from quire.api.state import ApiState
from quire.api.token_logprobs import TokenNames, chat_logprobs
from quire.engine.output import OutputChunk
from quire.http.events import named_event
from quire.http.refusals import Refusal
from quire.request import FinishReason
from quire.text.tokenizer import IncrementalDetokenizer, Tokenizer

_encode = msgspec.json.Encoder().encode
_PREFIXES = {Kind.TEXT: "msg_", Kind.REASONING: "rs_", Kind.CALL: "fc_"}
# Name of a part's events, the field of its text in them, and the type of its content.
_EVENTS = {
    Kind.TEXT: ("output_text", "text", "output_text"),
    Kind.REASONING: ("reasoning_text", "text", "reasoning_text"),
    Kind.CALL: ("function_call_arguments", "arguments", ""),
}


@dataclass(eq=False)
class ResponseAnswer(Answer):
    """The one response to a request, stored when it has ended. ``_echoed``: fields of the request that it repeats."""

    _state: ApiState
    head: Head
    plan: InitVar[OutputPlan | None]
    _echoed: dict[str, Any]
    _store: Callable[[dict[str, Any]], None]
    input_items: list[dict[str, Any]]
    _logprobs: TextLogprobs
    _tools: ResponseTools
    streamed: bool = False

    def __post_init__(self, plan: OutputPlan | None) -> None:
        self._assembler = Assembler(plan, lambda call: "call_" + self.head.id_of("call", call)[:24])
        self._ids: list[str] = []  # ids of the items
        self._cut = False  # a limit ended the answer
        self._cut_by = "max_output_tokens"  # or the context; or "deadline"
        self._num_events = 0

    def body(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        (chunk,) = chunks
        self._note_end(chunk)
        self._logprobs.feed(chunk)
        for event in self._assembler.feed(chunk.text, chunk.finish_reason):
            self._name(event)
        return _encode(self._complete(usage))

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        response = self.begun("queued" if self._echoed["background"] else "in_progress")
        created = self._event("response.created", {"response": response})
        return created + self._event("response.in_progress", {"response": response})

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        self._note_end(chunk)
        self._logprobs.feed(chunk)
        events = self._assembler.feed(chunk.text, chunk.finish_reason)
        return b"".join([self._part_events(event) for event in events])

    def closing(self, usage: Usage) -> bytes:
        kind = "response.incomplete" if self._cut else "response.completed"
        return self._event(kind, {"response": self._complete(usage)})

    def error(self, refusal: Refusal) -> bytes:
        self._cut = True  # the last item is incomplete
        status = "cancelled" if refusal.code == CANCELLED_BY_CLIENT else "failed"
        parts = [] if self._echoed["background"] else self._assembler.parts
        response = self._response(status, [self._item(part) for part in parts])
        if status == "failed":
            response["error"] = {"code": "server_error", "message": refusal.message}
        if self._echoed["background"]:
            self._store(response)
        return self._event("response.failed", {"response": response})

    def begun(self, status: str) -> dict[str, Any]:
        """Return the response before its first part."""
        return self._response(status, [])

    def _note_end(self, chunk: OutputChunk) -> None:
        self._cut = chunk.finish_reason in (FinishReason.LENGTH, FinishReason.DEADLINE)
        if chunk.finish_reason is FinishReason.DEADLINE:
            self._cut_by = "deadline"

    def _complete(self, usage: Usage) -> dict[str, Any]:
        response = self._response(
            "incomplete" if self._cut else "completed", [self._item(part) for part in self._assembler.parts]
        )
        if self._cut:
            response["incomplete_details"] = {"reason": self._cut_by}
        response["completed_at"] = None if self._cut else int(self._state.unix_time())
        count = self._state.frontend.tokenizer.encode
        thoughts = [part.text for part in self._assembler.parts if part.kind is Kind.REASONING]
        response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            # Counted from the text: the sampled tokens may split it differently.
            "output_tokens_details": {"reasoning_tokens": sum(len(count(text)) for text in thoughts)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        response |= usage.beside()
        self._store(response)
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        head = self.head
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": output,
            **self._echoed,
            "truncation": "disabled",
            "usage": None,
            "system_fingerprint": head.fingerprint,
            "determinism": head.determinism,
        }

    def _name(self, event: Event) -> None:
        """Give a part that opens the id of its item."""
        if event.verb == "open":
            part = event.part
            prefix = "ctc_" if self._is_custom(part) else _PREFIXES[part.kind]
            self._ids.append(prefix + self.head.id_of("item", part.index))

    def _is_custom(self, part: Part) -> bool:
        return part.kind is Kind.CALL and part.name in self._tools.custom

    def _item(self, part: Part, *, begun: bool = False) -> dict[str, Any]:
        """Return the output item of a part (``begun``: still empty); a part that a limit cut off is incomplete."""
        cut = self._cut and part is self._assembler.parts[-1]
        status = "in_progress" if begun else "incomplete" if cut else "completed"
        item = {"id": self._ids[part.index], "status": status}
        if part.kind is Kind.CALL:
            return self._tools.item(part, item["id"], status)
        content = [] if begun else [_content(part, part.text, self._logprobs.of(part.index))]
        if part.kind is Kind.REASONING:
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _part_events(self, event: Event) -> bytes:
        self._name(event)
        part = event.part
        name, text_field, content_type = _EVENTS[part.kind]
        text = part.text
        if self._is_custom(part):  # its text is known when its arguments are whole
            if event.verb == "more":
                return b""
            name, text_field, text = "custom_tool_call_input", "input", custom_tool_input(text)
        index = {"output_index": part.index}
        place: dict[str, Any] = {"item_id": self._ids[part.index], **index}
        if content_type:
            place["content_index"] = 0
        if event.verb == "more" or (event.verb == "close" and part.kind is Kind.TEXT):
            unsent = {"logprobs": self._logprobs.take(part.index)} if part.kind is Kind.TEXT else {}
        if event.verb == "more":
            return self._event(f"response.{name}.delta", {**place, "delta": event.text, **unsent})
        if event.verb == "open":
            added = self._event("response.output_item.added", {**index, "item": self._item(part, begun=True)})
            if content_type:
                added += self._event("response.content_part.added", {**place, "part": _content(part, "", [])})
            return added
        entries = self._logprobs.of(part.index)
        values = {**place, text_field: text, **({"logprobs": entries} if part.kind is Kind.TEXT else {})}
        done = b""
        if self._is_custom(part):
            done = self._event(f"response.{name}.delta", {**place, "delta": text})
        if part.kind is Kind.TEXT and unsent["logprobs"]:  # tokens whose text a stop string cut off
            done = self._event(f"response.{name}.delta", {**place, "delta": "", **unsent})
        done += self._event(f"response.{name}.done", values)
        if content_type:
            content = _content(part, part.text, entries)
            done += self._event("response.content_part.done", {**place, "part": content})
        return done + self._event("response.output_item.done", {**index, "item": self._item(part)})

    def _event(self, kind: str, values: dict[str, Any]) -> bytes:
        numbered = {"sequence_number": self._num_events, **values}
        self._num_events += 1
        return named_event(kind, numbered)


def _content(part: Part, text: str, logprobs: list[Any]) -> dict[str, Any]:
    if part.kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class TextLogprobs:
    """The log-probabilities of the tokens of text parts, by the index of the part.

    Tokens of reasoning, of calls and of the marks around them are left out. The part of a token depends only on the
    tokens up to it, so a stream and a whole answer agree. Without ``names`` all lists are empty.
    """

    def __init__(
        self,
        names: TokenNames | None,
        plan: OutputPlan | None,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
    ) -> None:
        self._names = names
        self._assembler = Assembler(plan, str)
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._entries: dict[int, list[Any]] = defaultdict(list)
        self._unassigned: list[tuple[Any, str]] = []  # tokens, with their text, that no part has received yet
        self._num_sent: dict[int, int] = defaultdict(int)

    def feed(self, chunk: OutputChunk) -> None:
        """Take the tokens of a chunk, in order."""
        if self._names is None or chunk.logprobs is None:
            return
        entries = chat_logprobs(chunk.logprobs, self._names)["content"]
        token_ids = list(chunk.token_ids)
        if chunk.finish_reason is FinishReason.STOP and not isinstance(chunk.stop_reason, str):
            del token_ids[-1:]  # the token that ended the answer has no text
        for token_id, entry in zip(token_ids, entries, strict=False):
            text = self._detokenizer.feed(token_id)
            self._unassigned.append((entry, text))
            if text:
                self._settle(self._assembler.feed(text, None))
        if chunk.finish_reason is not None:
            self._settle(self._assembler.feed(self._detokenizer.finish(), chunk.finish_reason))

    def _settle(self, events: list[Event]) -> None:
        """Give the tokens of each event's text to its part, and drop the tokens of marks before it."""
        for event in events:
            if event.verb != "more":
                continue
            start = "".join([text for _, text in self._unassigned]).find(event.text)
            if start < 0:  # the parser rewrote a call's arguments
                self._unassigned = []
                continue
            end, at = start + len(event.text), 0
            rest: list[tuple[Any, str]] = []
            for entry, text in self._unassigned:
                first, at = at, at + len(text)
                if at <= start and first < start:
                    continue
                if first >= end:
                    rest.append((entry, text))
                    continue
                if entry is not None and event.part.kind is Kind.TEXT:
                    self._entries[event.part.index].append(entry)
                if at > end:
                    # A token that spans two parts belongs to the first.
                    rest.append((None, text[end - first :]))
            self._unassigned = rest

    def of(self, index: int) -> list[Any]:
        """Return all entries of a part so far."""
        return list(self._entries[index])

    def take(self, index: int) -> list[Any]:
        """Return the entries of a part that no event has carried yet."""
        entries, first = self._entries[index], self._num_sent[index]
        self._num_sent[index] = len(entries)
        return entries[first:]
