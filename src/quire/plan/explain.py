"""``quire plan --explain``: every figure of a plan with its formula and the numbers in it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.plan.capacity import CapacityPlan
from quire.plan.cost_model import StepFeatures, chunk_pairs
from quire.plan.hardware import GIB
from quire.plan.roofline import Roofline
from quire.plan.split import UTILIZATION, Split, row_bytes


@dataclass(frozen=True, slots=True)
class Line:
    """``name`` = ``value``, by ``formula``."""

    name: str
    value: str
    formula: str


def explain(plan: CapacityPlan) -> list[Line]:
    """Return the figures of ``plan``, each after those from which it follows."""
    return (
        _memory(plan)
        + (_times(plan) if plan.advice.chosen and plan.advice.chosen.estimate else [])
        + _cost(plan)
    )


def _memory(plan: CapacityPlan) -> list[Line]:
    q, m = plan.question, plan.memory
    a = q.spec.layers[0].attention
    split = plan.advice.chosen.split if plan.advice.chosen else Split()
    if a.is_mla:
        kv = f"{q.spec.num_layers} layers · ({a.kv_lora_rank} latent + {a.head_dim - a.qk_nope_head_dim} rope) · bytes"
    else:
        kv = f"2 · {q.spec.num_layers} layers · {a.num_kv_heads} kv heads · {a.head_dim} head_dim · bytes"
    return [
        Line("K and V a token", f"{m.kv_bytes_per_token:,} B", f"{kv} of {q.kv_dtype}"),
        Line("K and V a request", _gib(m.kv_bytes_per_request),
             f"{m.context:,} tokens, a window's layers no more than their window"),
        Line("weights", _gib(m.weights),
             f"{q.spec.num_params / 1e9:.2f}e9 weights as {q.precision}, the part of one device of {split}"),
        Line("activations", _gib(m.activations),
             f"{q.max_num_batched_tokens:,} rows · {row_bytes(q.spec, split):,} B (3 hidden + the widest block)"),
        Line("workspace", _gib(m.workspace),
             f"{q.max_num_seqs} · {q.spec.vocab_size:,} / tp logits · 4 B + libraries and context"),
        Line("graphs", _gib(m.graphs), "captured steps, buffers of collectives"),
        Line("cache", _gib(m.kv_pool),
             f"{UTILIZATION} · {_gib(m.capacity)} − weights − activations − workspace − graphs"),
        Line("requests at once", f"{m.max_requests:,}",
             f"{_gib(m.kv_pool)} / {_gib(m.kv_request_share)} of a request on one device"),
    ]  # fmt: skip


def _times(plan: CapacityPlan) -> list[Line]:
    q, chosen = plan.question, plan.advice.chosen
    assert chosen is not None
    assert chosen.estimate is not None
    replica, s = q.replica(chosen.split, chosen.memory), chosen.estimate
    assert isinstance(replica.steps, Roofline)
    hw, e, shard = q.hardware, q.efficiency, replica.steps.work.shard
    b = max(1, round(s.concurrency))
    context = round(b * (q.load.isl + q.load.osl / 2))
    decode = replica.steps.parts(StepFeatures(b, b, b, context, 0, 0))
    rows = min(q.load.isl, replica.chunk)
    chunk = replica.steps.parts(StepFeatures(rows, 1, 1, 0, rows, chunk_pairs(0, rows)))
    rate, weights = hw.rate(q.precision) or 0.0, shard.dense_bytes + shard.head_bytes
    params = shard.dense_params / 1e9
    lines = [
        Line("decode step", _ms(s.decode_s),
             f"{b} sequences: linears {_ms(decode.linears)} ({decode.bound}: {_gib(weights)} / "
             f"({hw.bandwidth / 1e9:,.0f} GB/s · {e.memory:.2f})) + experts {_ms(decode.experts)} + attention "
             f"{_ms(decode.attention)} + links {_ms(decode.links)} + launches {_ms(decode.launches)}"),
        Line("prompt alone", _ms(chunk.seconds),
             f"{rows:,} rows: linears {_ms(chunk.linears)} ({chunk.bound}: 2 · {params:.2f}e9 · rows / "
             f"({rate / 1e12:,.0f}e12 · {e.compute:.2f})) + experts {_ms(chunk.experts)} + attention "
             f"{_ms(chunk.attention)} + links {_ms(chunk.links)} + launches {_ms(chunk.launches)}"),
        Line("prompt among others", _ms(s.prefill_s), f"added to steps with {b} decodes: weights are read anyway"),
    ]  # fmt: skip
    if q.load.rate is None:
        tpot = "(E2EL − TTFT) / (osl − 1), E2EL = osl · step + clients · prompt"
        ttft = f"prompt · {e.wave:.2f} · {b} ** {e.wave_growth:.2f} + a step + {_ms(e.first_s)}"
        lines += [Line("TPOT", _ms(s.tpot_s), tpot), Line("TTFT", _ms(s.ttft_s), ttft)]
    else:
        r = q.load.rate / chosen.split.dp
        ttft = f"half a step + r · prompt² / (2 (1 − r · prompt)) + prompt + a step + {_ms(e.first_s)} around"
        lines += [
            Line("TPOT", _ms(s.tpot_s), f"step / (1 − {r:.3g}/s · prompt)"),
            Line("TTFT", _ms(s.ttft_s), ttft),
            Line("running", f"{s.concurrency:.1f}", f"{r:.3g}/s · {q.load.osl} · TPOT, in a replica"),
        ]
    if plan.knee is not None:
        highest = f"highest rate whose means meet {q.slo}, all replicas"
        lines.append(Line("knee", f"{plan.knee:.2f}/s", highest))
    lines.append(Line("constants", "", e.how))
    return lines


def _cost(plan: CapacityPlan) -> list[Line]:
    cost = plan.cost
    if cost is None or cost.usd_per_hour is None:
        return [Line("cost", "unknown", f"the table has no price of {plan.question.hardware.title}")]
    assert cost.usd_per_million_input is not None
    assert cost.usd_per_million_output is not None
    return [
        Line("rent", f"${cost.usd_per_hour:.2f}/h", cost.price_source),
        Line("a million tokens in", f"${cost.usd_per_million_input:.3f}", "rent / requests · prompts' time / isl"),
        Line("a million tokens out", f"${cost.usd_per_million_output:.3f}", "rent / requests · decodes' time / osl"),
    ]  # fmt: skip


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _ms(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds * 1e3:.3g} ms"
    return "without bound" if seconds == float("inf") else f"{seconds:.1f} s"
