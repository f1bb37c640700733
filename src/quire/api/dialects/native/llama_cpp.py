"""llama.cpp's ``/completion`` and ``/infill``: a text completion in their form, with one prompt and one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.api.dialects.native.forms import LIMITS, _encode, plain_event, single_answer
from quire.api.dialects.openai.completions import completion_job
from quire.api.job import Answer, Head, Job, Usage
from quire.api.state import ApiState
from quire.engine.output import OutputChunk
from quire.http.call import Call
from quire.http.refusals import Refusal
from quire.http.wire import not_allowed
from quire.request import FinishReason


async def llama_completion_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Return the job of ``/completion``: llama.cpp's names are those of ``/v1/completions`` here, without a limit."""
    if not isinstance(body, dict):
        return await completion_job(state, call, body, ignored)
    limit = {} if any(body.get(name) is not None for name in LIMITS) else {"max_tokens": -1}
    job = single_answer(await completion_job(state, call, {**body, **limit}, ignored), "prompt")
    return replace(job, timing=True, answer=LlamaAnswer(job.answer, str(body.get("prompt", ""))))


async def llama_infill_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Return the job of ``/infill``: the text between ``input_prefix`` and ``input_suffix``.

    ``prompt`` is the beginning of the line at the cursor, and ``input_extra`` has other files, which come first.
    """
    if not isinstance(body, dict):
        return await completion_job(state, call, body, ignored)
    rest = dict(body)
    texts = {name: rest.pop(name, None) or "" for name in ("input_prefix", "input_suffix", "prompt")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise not_allowed(name, text, "a string", "invalid_type")
    extra = rest.pop("input_extra", None) or []
    if not isinstance(extra, list) or not all(isinstance(file, dict) for file in extra):
        raise not_allowed("input_extra", extra, "a list of objects with filename and text", "invalid_type")
    before = "".join(f"{file.get('filename', '')}\n{file.get('text', '')}\n" for file in extra)
    prompt = before + texts["input_prefix"] + texts["prompt"]
    return await llama_completion_job(
        state, call, {**rest, "prompt": prompt, "suffix": texts["input_suffix"] or "\n"}, ignored
    )


class LlamaAnswer(Answer):
    """``{content, stop, …}``; a stream has one event per piece and a last one with everything but the text."""

    def __init__(self, plain: Answer, prompt: str) -> None:
        self.head: Head = plain.head
        self.streamed = plain.streamed
        self._prompt = prompt
        self._last = OutputChunk(0)

    def body(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        return _encode({"content": chunks[0].text, **self._end(chunks[0], usage)})

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        return b""

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        if chunk.finish_reason is not None:
            self._last = chunk
        return plain_event({"index": 0, "content": chunk.text, "stop": False}) if chunk.text else b""

    def closing(self, usage: Usage) -> bytes:
        return plain_event({"content": "", **self._end(self._last, usage)})

    def error(self, refusal: Refusal) -> bytes:
        return b"data: " + refusal.body() + b"\n\n"

    def _end(self, chunk: OutputChunk, usage: Usage) -> dict[str, Any]:
        word = chunk.stop_reason if isinstance(chunk.stop_reason, str) else ""
        kind = "word" if word else "eos" if chunk.finish_reason is FinishReason.STOP else "limit"
        timing = usage.timing if isinstance(usage.timing, dict) else {}
        prefill_ms, total_ms = (timing.get(name) or 0.0 for name in ("first_token_ms", "total_ms"))
        return {
            "index": 0, "id_slot": 0, "stop": True, "model": self.head.model, "prompt": self._prompt,
            "tokens_predicted": usage.completion_tokens, "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens, "truncated": usage.truncated_tokens > 0,
            "stop_type": kind, "stopping_word": word,
            "timings": {
                "prompt_n": usage.prompt_tokens - usage.cached_tokens, "prompt_ms": prefill_ms,
                "predicted_n": usage.completion_tokens, "predicted_ms": max(0.0, total_ms - prefill_ms),
            },
        }  # fmt: skip
