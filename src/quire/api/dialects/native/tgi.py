"""TGI's ``/generate`` and ``/generate_stream``: a text completion in their form, with one prompt and one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quire.api.dialects.native.forms import LIMITS, _encode, plain_event, single_answer
from quire.api.dialects.openai.completions import completion_job
from quire.api.job import Answer, Head, Job, Usage
from quire.api.state import ApiState
from quire.api.token_logprobs import TokenNames
from quire.engine.output import OutputChunk
from quire.http.call import Call
from quire.http.refusals import Refusal
from quire.http.wire import not_allowed
from quire.request import FinishReason

_TGI_MAX_TOKENS = 100  # TGI's default


# Any of these makes TGI sample; else it is greedy.
_TGI_SAMPLES = ("temperature", "top_k", "top_p", "typical_p")


async def tgi_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Return the job of ``/generate``, and of ``/generate_stream`` (`tgi_stream_job`)."""
    return await _tgi_job(state, call, body, ignored, streamed=False)


async def tgi_stream_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Return the job of ``/generate_stream``: as ``/generate``, in events."""
    return await _tgi_job(state, call, body, ignored, streamed=True)


async def _tgi_job(
    state: ApiState, call: Call, body: Any, ignored: list[str] | None, *, streamed: bool
) -> Job:
    if not isinstance(body, dict):
        return await completion_job(state, call, body, ignored)
    params = body.get("parameters") or {}
    if not isinstance(params, dict):
        raise not_allowed("parameters", params, "an object", "invalid_type")
    if not isinstance(body.get("inputs"), str):
        raise not_allowed("inputs", body.get("inputs"), "a string", "invalid_type")
    fields = {name: value for name, value in params.items() if value is not None}
    details = fields.pop("details", False) is True
    full_text = fields.pop("return_full_text", False) is True
    samples = fields.pop("do_sample", False) is True or any(name in fields for name in _TGI_SAMPLES)
    for name in ("watermark", "decoder_input_details", "top_n_tokens"):
        if not fields.get(name):
            fields.pop(name, None)
    form = fields.get("grammar")
    if isinstance(form, dict):
        del fields["grammar"]
        name = "guided_regex" if form.get("type") == "regex" else "guided_json"
        fields[name] = form.get("value")
    if not samples:
        fields["temperature"] = 0
    if not any(name in fields for name in LIMITS):
        fields["max_tokens"] = _TGI_MAX_TOKENS
    rest = {name: value for name, value in body.items() if name not in ("inputs", "parameters", "stream")}
    # The body's own fields win: a gateway writes model and cache_salt there.
    made = {**fields, **rest, "prompt": body["inputs"], "logprobs": 0, "stream": streamed}
    job = single_answer(await completion_job(state, call, made, ignored), "inputs")
    names = TokenNames(state.frontend.tokenizer, as_ids=False)
    answer = TgiAnswer(
        job.answer,
        names,
        prefix=body["inputs"] if full_text else "",
        details=details,
        seed=params.get("seed"),
    )
    return replace(job, prompt_param="inputs", answer=answer)


class TgiAnswer(Answer):
    """``{generated_text, details}``; a stream has one event per token, the last with the whole text."""

    def __init__(self, plain: Answer, names: TokenNames, *, prefix: str, details: bool, seed: Any) -> None:
        self.head: Head = plain.head
        self.streamed = plain.streamed
        self._names, self._prefix, self._details, self._seed = names, prefix, details, seed
        self._text = ""
        self._num_tokens = 0

    def body(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        chunk = chunks[0]
        value: dict[str, Any] = {"generated_text": self._prefix + chunk.text}
        if self._details:
            tokens = [self._token(chunk, i, self._names.text(t)) for i, t in enumerate(chunk.token_ids)]
            value["details"] = {**self._ended(chunk, usage), "prefill": [], "tokens": tokens}
        return _encode(value)

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        return b""

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        self._text += chunk.text
        last = chunk.finish_reason is not None
        events = []
        for i in range(len(chunk.token_ids)):
            self._num_tokens += 1
            ends = last and i == len(chunk.token_ids) - 1
            events.append(
                plain_event(
                    {
                        "index": self._num_tokens,
                        # The texts of the events add up to the answer's.
                        "token": self._token(chunk, i, "" if i else chunk.text),
                        "generated_text": self._prefix + self._text if ends else None,
                        "details": self._ended(chunk, usage) if ends else None,
                    }
                )
            )
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        return b""

    def error(self, refusal: Refusal) -> bytes:
        return plain_event({"error": refusal.message, "error_type": refusal.code or "generation"})

    def _token(self, chunk: OutputChunk, i: int, text: str) -> dict[str, Any]:
        token_id = chunk.token_ids[i]
        logprob = chunk.logprobs[i].logprob if chunk.logprobs else 0.0
        special = token_id in self._names.tokenizer.special_token_ids
        return {"id": token_id, "text": text, "logprob": max(logprob, -9999.0), "special": special}

    def _ended(self, chunk: OutputChunk, usage: Usage) -> dict[str, Any]:
        stopped = "stop_sequence" if isinstance(chunk.stop_reason, str) else "eos_token"
        finish = stopped if chunk.finish_reason is FinishReason.STOP else "length"
        return {"finish_reason": finish, "generated_tokens": usage.completion_tokens, "seed": self._seed}
