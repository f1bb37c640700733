"""Routing and expert products against a loop in fp64, and their independence of the batch."""

from __future__ import annotations

import pytest
import torch
from tests.kernels import cases
from tests.kernels.checks import (
    DTYPES,
    assert_close,
    assert_rows_independent,
    assert_same_bits,
    each,
    generator,
)
from tests.kernels.test_quantized_linear import random_weight

from quire.families.gguf_types import BLOCK_TYPES
from quire.kernels.linear import linear, pack_empty, write_bias, write_rows
from quire.kernels.moe import ExpertStack, experts, route
from quire.kernels.pointwise import add_gated_rows, gated, widen_rows
from quire.kernels.registry import NATIVE_LEVELS, Backend, backends
from quire.quant.rtn import round_to_nearest
from quire.weight_format import PLAIN, WeightFormat

FORMATS = [
    WeightFormat("int8"), WeightFormat("int8", 16), WeightFormat("int4", 32), WeightFormat("int4", 16),
    *(BLOCK_TYPES[name].held for name in ("q2_k", "q4_k", "q6_k", "mxfp4")),
]  # fmt: skip
ROTATED = [WeightFormat("int8", rotation=16), WeightFormat("int4", 16, rotation=16)]
QUANTIZED = [
    *((case, format) for case in cases.MOE if case.num_tokens for format in FORMATS),
    *(
        (case, format)
        for case in cases.MOE
        if case.num_tokens and not case.hidden_size % 16 and not case.spec.intermediate_size % 16
        for format in ROTATED
    ),
]


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


@each("backend", backends("moe.route"))
@pytest.mark.parametrize("case", cases.MOE, ids=lambda case: case.name)
def test_route_against_a_loop(case: cases.MoeCase, backend: Backend) -> None:
    logits, correction = make_route(case, case.num_tokens)
    weights, ids = route.on(backend)(logits, case.spec, correction)
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
    case: cases.MoeCase, dtype: torch.dtype, bias: bool, backend: Backend, format: WeightFormat = PLAIN
) -> tuple[ExpertStack, list[tuple[torch.Tensor, ...]]]:
    """Experts and, beside them, the plain matrices they hold (rounded to the format)."""
    rng = generator()
    inter, hidden = case.spec.intermediate_size, case.hidden_size
    stack = ExpertStack([], [], "silu")
    plain = []
    for _ in range(case.spec.num_experts):
        parts: list[torch.Tensor] = []
        for matrices, n, k in ((stack.gate_up, 2 * inter, hidden), (stack.down, hidden, inter)):
            weight = torch.randn(n, k, generator=rng).to(dtype)
            own = torch.randn(n, generator=rng).to(dtype) * bias
            packed = pack_empty(n, k, dtype, bias=bias, backend=backend, format=format)
            if format.wide != format:  # of GGUF, which nothing is rounded to
                write_rows(packed, 0, random_weight(n, k, format))
            else:
                write_rows(packed, 0, round_to_nearest(weight, format) if format.quantized else weight)
            if bias:
                write_bias(packed, 0, own)
            matrices.append(packed)  # type: ignore[attr-defined]
            parts += [weight, own]
        plain.append(tuple(parts))
    return stack, plain


def native(op: str) -> list[Backend]:
    return [backend for backend in backends(op) if backend in NATIVE_LEVELS]


@each("backend", backends("moe.experts"))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.MOE, ids=lambda case: case.name)
def test_experts_against_a_loop(
    case: cases.MoeCase, dtype: torch.dtype, bias: bool, backend: Backend
) -> None:
    stack, plain = make_experts(case, dtype, bias, backend)
    x = torch.randn(case.num_tokens, case.hidden_size, generator=generator(3)).to(dtype)
    logits, correction = make_route(case, case.num_tokens)
    weights, ids = route(logits, case.spec, correction)
    oracle = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(case.num_tokens):
        for j in range(case.spec.top_k):
            up_w, up_b, down_w, down_b = (t.double() for t in plain[int(ids[row, j])])
            gate, up = (up_w @ x[row].double() + up_b).chunk(2)
            oracle[row] += weights[row, j].double() * (down_w @ (gate * gate.sigmoid() * up) + down_b)
    assert_close("experts", experts.on(backend)(x, weights, ids, stack), oracle)


@each("backend", native("moe.experts"))
@pytest.mark.parametrize(
    ("case", "format"), QUANTIZED, ids=lambda each: getattr(each, "name", None) or repr(each)
)
def test_quantized_experts_are_linears_one_by_one(
    case: cases.MoeCase, format: WeightFormat, backend: Backend
) -> None:
    """Bit for bit what the same level's linears and activation give, expert by expert."""
    for dtype in DTYPES:
        stack, _ = make_experts(case, dtype, True, backend, format)
        x = torch.randn(case.num_tokens, case.hidden_size, generator=generator(3)).to(dtype)
        weights, ids = route(*make_route(case, case.num_tokens)[:1], case.spec, make_route(case, 0)[1])
        want = torch.zeros(x.shape)
        activation = "avx512" if backend == "amx" else backend
        for j in range(case.spec.top_k):
            for e in range(case.spec.num_experts):
                rows = (ids[:, j] == e).nonzero()[:, 0]
                up = gated.on(activation)(linear(x[rows], stack.gate_up[e]), "silu")
                want[rows] += linear(up, stack.down[e]).float() * weights[rows, j, None]
        assert_same_bits(experts.on(backend)(x, weights, ids, stack), want.to(dtype), f"{case.name} {dtype}")


@each("backend", backends("moe.experts"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in cases.MOE if case.num_tokens], ids=lambda case: case.name)
def test_a_token_does_not_depend_on_the_batch(
    case: cases.MoeCase, dtype: torch.dtype, backend: Backend
) -> None:
    stack, _ = make_experts(case, dtype, False, backend)
    pool = torch.randn(35, case.hidden_size, generator=generator(4)).to(dtype)
    logits, correction = make_route(case, 35)

    def run(ids: torch.Tensor) -> torch.Tensor:
        weights, chosen = route.on(backend)(logits[ids], case.spec, correction)
        return experts.on(backend)(pool[ids], weights, chosen, stack)

    assert_rows_independent(run, 35, case.name)
    assert_rows_independent(
        lambda ids: route.on(backend)(logits[ids], case.spec, correction)[0], 35, f"{case.name} weights"
    )


@each("backend", native("add_gated_rows"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_expert_behind_its_gate(dtype: torch.dtype, backend: Backend) -> None:
    rng = generator(5)
    x, other = (torch.randn(7, 45, generator=rng).to(dtype) for _ in range(2))
    gate = torch.randn(7, 1, generator=rng).to(dtype) * 3
    assert_same_bits(widen_rows.on(backend)(x), x.float(), "widen")
    got = add_gated_rows.on(backend)(x, other, gate)
    assert_close("gated", got, x.double() + other.double() * gate.double().sigmoid())


@each("backend", backends("moe.route"))
def test_equal_scores_choose_alike(backend: Backend) -> None:
    """Ties are broken by the row alone."""
    case = cases.MOE[0]
    logits = torch.zeros(33, case.spec.num_experts)
    _, ids = route.on(backend)(logits, case.spec, None)
    assert_same_bits(ids.float(), ids[:1].expand_as(ids).float(), "ties")
