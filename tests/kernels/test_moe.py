"""Routing and expert products against a loop in fp64, and their independence of the batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.kernels.checks import DTYPES, assert_close, assert_rows_independent, assert_same_bits, generator

from quire.kernels import cases
from quire.kernels.activation import gated
from quire.kernels.linear import PackedLinear, pack_empty, write_bias, write_rows
from quire.kernels.moe import experts, route


def route_oracle(
    logits: torch.Tensor, case: cases.MoeCase, correction: torch.Tensor | None
) -> list[dict[int, float]]:
    """For every token: expert → weight."""
    spec = case.spec
    chosen = []
    for row in logits.double():
        if spec.scoring == "softmax_after_topk":
            best = row.argsort(descending=True)[: spec.top_k].tolist()
            soft = row[best].softmax(0)
            chosen.append({e: float(w) * spec.routed_scale for e, w in zip(best, soft, strict=True)})
            continue
        scores = row.softmax(0) if spec.scoring == "softmax" else row.sigmoid()
        choice = scores if correction is None else scores + correction.double()
        groups = choice.view(spec.num_groups, -1)
        if spec.num_groups > 1:
            value = groups.max(1).values if spec.group_score == "max" else groups.topk(2).values.sum(1)
            kept = value.argsort(descending=True)[: spec.topk_groups].tolist()
            allowed = [
                e for e in range(spec.num_experts) if e // (spec.num_experts // spec.num_groups) in kept
            ]
        else:
            allowed = list(range(spec.num_experts))
        best = sorted(allowed, key=lambda e: -float(choice[e]))[: spec.top_k]
        total = sum(float(scores[e]) for e in best) if spec.normalize_topk else 1.0
        chosen.append({e: float(scores[e]) / total * spec.routed_scale for e in best})
    return chosen


def make_route(case: cases.MoeCase, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    rng = generator()
    logits = torch.randn(tokens, case.spec.num_experts, generator=rng) * 2
    correction = torch.randn(case.spec.num_experts, generator=rng) if case.spec.correction_bias else None
    return logits, correction


@pytest.mark.parametrize("case", cases.MOE, ids=lambda case: case.name)
def test_route_against_a_loop(case: cases.MoeCase) -> None:
    logits, correction = make_route(case, case.num_tokens)
    weights, ids = route(logits, case.spec, correction)
    expected = route_oracle(logits, case, correction)
    for row, want in enumerate(expected):
        got = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert got.keys() == want.keys()
        order = sorted(want)
        assert_close(
            "route",
            torch.tensor([got[e] for e in order]),
            torch.tensor([want[e] for e in order], dtype=torch.float64),
        )


def make_experts(
    case: cases.MoeCase, dtype: torch.dtype, bias: bool
) -> tuple[list[PackedLinear], list[PackedLinear], list[tuple[torch.Tensor, ...]]]:
    rng = generator()
    inter, hidden = case.spec.intermediate_size, case.hidden_size
    gate_up, down, plain = [], [], []
    for _ in range(case.spec.num_experts):
        up_weight = torch.randn(2 * inter, hidden, generator=rng).to(dtype)
        down_weight = torch.randn(hidden, inter, generator=rng).to(dtype)
        biases = [torch.randn(n, generator=rng).to(dtype) * bias for n in (2 * inter, hidden)]
        gate_up.append(pack_empty(2 * inter, hidden, dtype, bias=bias, backend="reference"))
        down.append(pack_empty(hidden, inter, dtype, bias=bias, backend="reference"))
        for packed, weight, b in ((gate_up[-1], up_weight, biases[0]), (down[-1], down_weight, biases[1])):
            write_rows(packed, 0, weight)
            if bias:
                write_bias(packed, 0, b)
        plain.append((up_weight, down_weight, *biases))
    return gate_up, down, plain


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.MOE, ids=lambda case: case.name)
def test_experts_against_a_loop(case: cases.MoeCase, dtype: torch.dtype, bias: bool) -> None:
    gate_up, down, plain = make_experts(case, dtype, bias)
    activate = partial(gated, kind="silu")
    x = torch.randn(case.num_tokens, case.hidden_size, generator=generator(3)).to(dtype)
    logits, correction = make_route(case, case.num_tokens)
    weights, ids = route(logits, case.spec, correction)
    oracle = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(case.num_tokens):
        for j in range(case.spec.top_k):
            up_w, down_w, up_b, down_b = (t.double() for t in plain[int(ids[row, j])])
            gate, up = (up_w @ x[row].double() + up_b).chunk(2)
            oracle[row] += weights[row, j].double() * (down_w @ (gate * gate.sigmoid() * up) + down_b)
    assert_close("experts", experts(x, weights, ids, gate_up, down, activate), oracle)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in cases.MOE if case.num_tokens], ids=lambda case: case.name)
def test_a_token_does_not_depend_on_the_batch(case: cases.MoeCase, dtype: torch.dtype) -> None:
    gate_up, down, _ = make_experts(case, dtype, False)
    activate = partial(gated, kind="silu")
    pool = torch.randn(35, case.hidden_size, generator=generator(4)).to(dtype)
    logits, correction = make_route(case, 35)

    def run(ids: torch.Tensor) -> torch.Tensor:
        weights, chosen = route(logits[ids], case.spec, correction)
        return experts(pool[ids], weights, chosen, gate_up, down, activate)

    assert_rows_independent(run, 35, case.name)
    assert_rows_independent(
        lambda ids: route(logits[ids], case.spec, correction)[0], 35, f"{case.name} weights"
    )


def test_equal_scores_choose_alike() -> None:
    """Ties are broken by the row alone."""
    case = cases.MOE[0]
    logits = torch.zeros(33, case.spec.num_experts)
    _, ids = route(logits, case.spec)
    assert_same_bits(ids.float(), ids[:1].expand_as(ids).float(), "ties")
