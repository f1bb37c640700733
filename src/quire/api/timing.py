"""What is told of a request's phases: the ``timing`` block of an answer, and spans for a tracer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.api.cache_miss import RecentPrompts, located, miss_reason
from quire.api.job import Job
from quire.api.state import ApiState
from quire.engine.stream import RequestStream
from quire.http.call import Call
from quire.metrics.engine_stats import EngineStats
from quire.metrics.trace import RequestPhases, RequestTracer


def describe_timing(state: ApiState, job: Job, streams: Sequence[RequestStream], total_s: float) -> Any:
    """Return the ``timing`` block of an answer that has ended: one object, or a list of one per prompt."""
    speculation = _speculation(state.frontend.stats())
    blocks = [
        _timing(stream, job.answer.head.determinism, total_s)
        | {"cache": _cache(state, job, stream)}
        | _remote(job, stream)
        | speculation
        for stream in streams
    ]
    return blocks[0] if len(blocks) == 1 else blocks


def _cache(state: ApiState, job: Job, stream: RequestStream) -> dict[str, Any]:
    """Return where the prompt left what the cache had of it."""
    recent = state.on_demand.setdefault("recent_prompts", RecentPrompts())
    adapter, timing, token_ids = stream.adapter, stream.output.timing, stream.prompt_token_ids
    caller = (job.owner, job.terms.cache_salt, None if adapter is None else adapter.key)
    block_size = int(str(state.settings.cache_config.get("block_size", 16)))
    reason = miss_reason(recent, caller, token_ids, timing.num_cached_tokens, timing.cache_miss, block_size)
    if reason is not None:
        reason |= located(reason["token"], token_ids, job.messages, state.frontend.tokenizer)
    return {"miss_reason": reason}


def _timing(stream: RequestStream, determinism: str, total_s: float) -> dict[str, Any]:
    output, timing = stream.output, stream.output.timing
    has_token = timing.ttft_s > 0.0
    return {
        "queued_ms": _ms(timing.queued_s),
        "prefill_ms": _ms(timing.ttft_s - timing.queued_s) if has_token else None,
        "first_token_ms": _ms(timing.ttft_s) if has_token else None,
        "total_ms": _ms(total_s),
        "prompt_tokens": len(stream.prompt_token_ids),
        "cached_tokens": timing.num_cached_tokens,
        "loaded_tokens": min(timing.num_loaded_tokens, timing.num_cached_tokens),
        "cache_miss": timing.cache_miss or None,
        "completion_tokens": output.num_output_tokens,
        "preemptions": output.num_preemptions,
        "chunks": output.num_chunks,
        "steps": output.num_steps,
        "accepted_drafts": output.num_accepted,
        "engine_s": round(output.engine_s, 6),
        "kv_block_s": round(output.kv_block_s, 6),
        "seed": stream.seed,
        "determinism": determinism,
    }


def _remote(job: Job, stream: RequestStream) -> dict[str, Any]:
    """Return how much of the prompt another engine has computed, where the request names one."""
    if job.terms.kv is None or not job.terms.kv.engine_id:
        return {}
    timing = stream.output.timing
    return {"prefill_remote_tokens": min(timing.num_loaded_tokens, timing.num_cached_tokens)}


def _speculation(stats: EngineStats) -> dict[str, Any]:
    """Return what the engine's control of drafts has chosen at the end of the answer; nothing without speculation."""
    if not stats.accepted_at:
        return {}
    measured = round(stats.measured_draft_gain, 3) or None
    gains = {"predicted_gain": round(stats.draft_gain, 3), "measured_gain": measured}
    return {"speculation": {"drafts": stats.num_chosen_drafts, **gains}}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def span_writer(
    tracer: RequestTracer, trace: Mapping[str, str], job: Job, call: Call, stream: RequestStream
) -> Callable[[RequestPhases], None]:
    """Return the function that makes the spans of a prompt when it ends. ``trace``: the headers of the client's."""
    sampling = job.sampling
    attributes = {
        "gen_ai.request.id": stream.request_id,
        "gen_ai.response.model": job.answer.head.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": sampling.n,
        "http.request_id": call.request_id,
    }
    return tracer.follow(trace, attributes)
