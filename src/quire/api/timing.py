"""``timing: true``: where the time of an answer went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.engine.stream import RequestStream


def timing_of(streams: Sequence[RequestStream], determinism: str, total_s: float) -> Any:
    """Return the block of an answer that has ended: an object, or one for each prompt where there are several."""
    blocks = [_block(stream, determinism, total_s) for stream in streams]
    return blocks[0] if len(blocks) == 1 else blocks


def _block(stream: RequestStream, determinism: str, total_s: float) -> dict[str, Any]:
    output = stream.output
    has_token = output.ttft_s > 0.0
    return {
        "queued_ms": _ms(output.queued_s),
        "prefill_ms": _ms(output.ttft_s - output.queued_s) if has_token else None,
        "first_token_ms": _ms(output.ttft_s) if has_token else None,
        "total_ms": _ms(total_s),
        "prompt_tokens": len(stream.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "cache_miss": output.cache_miss or None,
        "completion_tokens": output.num_output_tokens,
        "preemptions": output.num_preemptions,
        "chunks": output.num_chunks,
        "steps": output.num_steps,
        "seed": stream.seed,
        "determinism": determinism,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
