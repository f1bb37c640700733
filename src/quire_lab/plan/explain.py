"""``quire plan --explain``: every figure of a plan with its formula and the numbers in it."""

from __future__ import annotations

from quire.cost.cost_model import StepFeatures, chunk_pairs
from quire.cost.roofline import Roofline
from quire.cost.split import UTILIZATION, Split, row_bytes
from quire_lab.plan.capacity import CapacityPlan
from quire_lab.plan.draft import Draft, Drafting
from quire_lab.plan.explain_limits import limits, money
from quire_lab.plan.explain_line import Line, gib, ms


def explain(
    plan: CapacityPlan,
    api_usd_per_million: float | None = None,
    usd_per_kwh: float = 0.12,
    people_usd_per_month: float = 0.0,
) -> list[Line]:
    """Return the figures of ``plan``, each after those from which it follows.

    ``api_usd_per_million``: USD per million tokens, in and out, of an API to compare with, which needs no
    ``people_usd_per_month``.
    """
    return (
        _memory(plan)
        + (_times(plan) + limits(plan) if plan.advice.chosen and plan.advice.chosen.estimate else [])
        + _cost(plan)
        + money(plan, api_usd_per_million, usd_per_kwh, people_usd_per_month)
    )


def _memory(plan: CapacityPlan) -> list[Line]:
    q, m = plan.question, plan.memory
    a = q.spec.attentions[0]
    split = plan.advice.chosen.split if plan.advice.chosen else Split()
    num_layers = len(q.spec.attentions)
    if a.is_mla:
        kv = f"{num_layers} layers · ({a.kv_lora_rank} latent + {a.head_dim - a.qk_nope_head_dim} rope) · bytes"
    else:
        kv = f"2 · {num_layers} layers · {a.num_kv_heads} kv heads · {a.head_dim} head_dim · bytes"
    return [
        Line("K and V a token", f"{m.kv_bytes_per_token:,} B", f"{kv} of {q.kv_dtype}"),
        Line("K and V a request", gib(m.kv_bytes_per_request),
             f"{m.context:,} tokens, a window's layers no more than their window"),
        Line("weights", gib(m.weights),
             f"{q.spec.num_params / 1e9:.2f}e9 weights as {q.precision}, the part of one device of {split}"),
        Line("activations", gib(m.activations),
             f"{q.max_num_batched_tokens:,} rows · {row_bytes(q.spec, split):,} B (3 hidden + the widest block)"),
        Line("workspace", gib(m.workspace),
             f"{q.max_num_seqs} · {q.spec.vocab_size:,} / tp logits · 4 B + libraries and context"),
        Line("graphs", gib(m.graphs), "captured steps, buffers of collectives"),
        Line("cache", gib(m.kv_pool),
             f"{UTILIZATION} · {gib(m.capacity)} − weights − activations − workspace − graphs"),
        Line("requests at once", f"{m.max_requests:,}",
             f"{gib(m.kv_pool)} / {gib(m.kv_request_share)} of a request on one device"),
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
        Line("decode step", ms(s.decode_s),
             f"{b} sequences: linears {ms(decode.linears)} ({decode.bound}: {gib(weights)} / "
             f"({hw.bandwidth / 1e9:,.0f} GB/s · {e.memory:.2f})) + experts {ms(decode.experts)} + attention "
             f"{ms(decode.attention)} + links {ms(decode.links)} + launches {ms(decode.launches)}"),
        Line("prompt alone", ms(chunk.seconds),
             f"{rows:,} rows: linears {ms(chunk.linears)} ({chunk.bound}: 2 · {params:.2f}e9 · rows / "
             f"({rate / 1e12:,.0f}e12 · {e.share(rows):.2f})) + experts {ms(chunk.experts)} + attention "
             f"{ms(chunk.attention)} + links {ms(chunk.links)} + launches {ms(chunk.launches)}"),
        *_round(q.draft, replica.drafting, b, context),
        Line("prompt among others", ms(s.prefill_s), f"added to steps with {b} decodes: weights are read anyway"),
    ]  # fmt: skip
    if q.load.rate is None:
        tpot = "(E2EL − TTFT) / (osl − 1), E2EL = osl · step + clients · prompt"
        ttft = f"prompt · {e.wave:.2f} · {b} ** {e.wave_growth:.2f} + a step + {ms(e.first_s)}"
        if e.turn:
            ttft += f" + {e.turn:.2g} · osl · step / {b} ** {e.turn_decay:.2f}"
        if e.token_s:
            ttft += f" + {e.token_s * 1e6:.2g} µs · isl · {b}"
        lines += [Line("TPOT", ms(s.tpot_s), tpot), Line("TTFT", ms(s.ttft_s), ttft)]
    else:
        r = q.load.rate / chosen.split.dp
        ttft = f"half a step + r · prompt² / (2 (1 − r · prompt)) + prompt + a step + {ms(e.first_s)} around"
        lines += [
            Line("TPOT", ms(s.tpot_s), f"step / (1 − {r:.3g}/s · prompt)"),
            Line("TTFT", ms(s.ttft_s), ttft),
            Line("running", f"{s.concurrency:.1f}", f"{r:.3g}/s · {q.load.osl} · TPOT, in a replica"),
        ]
    if plan.knee is not None:
        highest = f"highest rate whose means meet {q.slo}, all replicas"
        lines.append(Line("knee", f"{plan.knee:.2f}/s", highest))
    lines.append(Line("constants", "", e.how))
    return lines


def _round(draft: Draft | None, drafting: Drafting | None, seqs: int, context: int) -> list[Line]:
    if draft is None or drafting is None:
        return []
    tokens = f"(1 − α^{draft.num_drafts + 1}) / (1 − α), α = {draft.acceptance:g}"
    steps = f"{draft.num_drafts} steps of {draft.model} for {seqs} sequences; a step above is a round / its tokens"
    return [
        Line("tokens of a round", f"{draft.tokens_per_round:.2f}", tokens),
        Line("drafts of a round", ms(drafting.propose_s(seqs, context)), steps),
    ]


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
