"""What a profile that `quire profile` kept of this machine says of the steps that a plan predicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.cost.cost_model import StepFeatures, chunk_pairs
from quire.cost.hardware import HERE
from quire.cost.kept_profiles import kept
from quire_lab.plan.capacity import CapacityPlan

_PRECISIONS = {"bf16": ("bfloat16", None), "fp32": ("float32", None)}  # dtype and quantize of a profile


def measured_here(answer: CapacityPlan) -> dict[str, Any] | None:
    """Return the prompt's and the decode step's time by the profile of this model and machine, None without one."""
    q, chosen = answer.question, answer.advice.chosen
    if q.hardware.name != HERE or chosen is None or chosen.split.num_devices > 1 or chosen.estimate is None:
        return None
    dtype, quantize = _PRECISIONS.get(q.precision, ("bfloat16", q.precision))
    kv_dtype = dtype if q.kv_dtype == "bf16" else q.kv_dtype
    profile = kept(q.model, settings={"dtype": dtype, "quantize": quantize, "kv_dtype": kv_dtype})
    if profile is None:
        return None
    path, made = profile
    isl, num = q.load.isl, max(1, round(chosen.estimate.concurrency))
    prompt_s = made.host.request_s
    for start in range(0, isl, q.max_num_batched_tokens):
        rows = min(q.max_num_batched_tokens, isl - start)
        is_last = int(start + rows == isl)
        prompt_s += made.step_time.seconds(
            StepFeatures(rows, 1, is_last, 0, start + rows, chunk_pairs(start, rows))
        )
    keys = num * (isl + q.load.osl // 2)
    return {
        "path": str(path),
        "measured_at": made.measured_at,
        "decodes": num,
        "prompt_ms": prompt_s * 1e3,
        "decode_step_ms": made.step_time.seconds(StepFeatures(num, num, num, keys, 0, 0)) * 1e3,
    }


def measured_lines(answer: CapacityPlan, measured: Mapping[str, Any] | None) -> list[str]:
    """Return the remark about it; on this machine without a profile, how to get one."""
    if measured is not None:
        day, isl, num = measured["measured_at"][:10], answer.question.load.isl, measured["decodes"]
        return [
            f"measured here on {day}: a prompt of {isl:,} tokens alone {measured['prompt_ms']:.1f} ms, "
            f"a decode step of {num} {measured['decode_step_ms']:.1f} ms"
        ]
    if answer.question.hardware.name == HERE:
        return [f"quire profile {answer.question.model} measures the steps; plan and simulate then find them"]
    return []
