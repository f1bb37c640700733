"""Whatever else is in the batch: logits bitwise and tokens equal to the request run alone.

A case is a tiny model and a dtype; each serves the same 64 requests under several policies with a pool small enough to
preempt. Over all cases every gate × order × budget occurs. One test demands that the runs exercised what they claim
to, and `-s` prints it. See docs/exactness.md.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from tests.exact.engine_run import Policy, Tally
from tests.exact.models import MODELS, VOCAB
from tests.exact.suite import BEST, POLICIES, Case, at_level, deal, serve_and_check, truth_of

from quire.errors import ModelLoadError
from quire.kernels.registry import NATIVE_LEVELS, backends
from quire.models import loader
from quire.models.hub import quill_path
from quire.request import FinishReason, TokenLogprobs
from quire.runner.model_runner import ModelRunner

# A case serves 64 requests under twelve policies: minutes with reference kernels on a busy machine.
DTYPES = ("float32", "bfloat16")
# One model in float32 by the reference's kernels, and the other cases by those that an engine takes here.
CASES = [
    Case(model, dtype, seed, cpu_isa="reference" if (model, dtype) == ("llama", "float32") else BEST)
    for seed, (model, dtype) in enumerate(itertools.product(("llama", "sliding", "moe"), DTYPES), 1)
]
POLICIES_OF: dict[Case, list[Policy]] = defaultdict(list)
for _case, _policy in deal(CASES):
    POLICIES_OF[_case].append(_policy)
TALLIES: dict[Case, Tally] = {}


@pytest.fixture(autouse=True)
def lively_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a spread of 0.3 the little models have opinions: attention matters and tokens vary."""
    monkeypatch.setattr(loader, "STD", 0.3)


def run_case(case: Case) -> Tally:
    """Run a case under its policies, once a session."""
    if case not in TALLIES:
        tally = Tally()
        for policy in POLICIES_OF[case]:
            tally += serve_and_check(case, policy).tally
        TALLIES[case] = tally
    return TALLIES[case]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_everyone_together_equals_each_one_alone(case: Case) -> None:
    print(f"\n{case}: {run_case(case)}")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sliding", "moe"])
def test_the_reference_is_exact_under_every_policy(model: str) -> None:
    """`tests.exact.test_quick` has fewer requests of these under fewer policies."""
    case = next(case for case in CASES if (case.model, case.dtype) == (model, "float32"))
    for policy in POLICIES_OF[case]:
        serve_and_check(replace(case, cpu_isa="reference"), policy)


def test_the_traffic_covers_what_it_claims() -> None:
    """Guards the suite itself: without preemptions, hits, chunks, forks and aborts it would prove little."""
    total = Tally()
    for case in CASES:
        total += run_case(case)
    print(f"\nexact suite: {total}")
    assert total.policies == set(POLICIES)
    assert total.num_preemptions >= 20
    assert total.num_cached_tokens >= 0.28 * total.num_prompt_tokens
    assert total.num_cached_tokens >= 50_000
    assert total.num_chunked_prompts >= 100
    assert total.num_forks >= 20
    assert total.num_aborts >= 10
    assert total.num_moves >= 20
    assert total.num_accepted >= 500
    assert total.num_rejected >= 200
    for case in CASES:
        assert run_case(case).num_preemptions > 0, f"{case} never ran out of blocks"


def test_sequences_alone_are_worth_comparing() -> None:
    """The truth itself: varied tokens, ends of both kinds, logprobs among the samples."""
    truth = truth_of(CASES[0])
    reasons = {reason for _, reason in truth.outputs.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({token_id for output, _ in truth.outputs.values() for token_id in output}) > VOCAB // 4
    assert any(isinstance(draw.logprobs, TokenLogprobs) for draw in truth.draws.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["latent", "post_norm"])
def test_other_architectures(model: str, dtype: str) -> None:
    serve_and_check(Case(model, dtype, 61, num_requests=20), Policy("continuous", "fcfs", 48))


@pytest.mark.parametrize("model", ["llama", "sliding"])
def test_failed_steps_leave_no_trace(model: str) -> None:
    """Sequences of a failed step end with its error; whoever shared blocks with them is exact all the same."""
    run = serve_and_check(
        Case(model, "float32", 71, num_requests=48), Policy("continuous", "priority", 40), fail_every=13
    )
    assert run.tally.num_failures >= 10


def test_two_threads_equal_one() -> None:
    serve_and_check(Case("llama", "float32", 21, num_requests=6), POLICIES[1], num_threads=2)


@pytest.mark.parametrize(
    ("level", "dtype"),
    # In float32, amx is avx512 in every op.
    [
        at_level(level, level, dtype)
        for level in NATIVE_LEVELS
        for dtype in DTYPES
        if (level, dtype) != ("amx", "float32")
    ],
)
def test_native_kernels_are_exact_too(level: str, dtype: str) -> None:
    if level not in backends("linear"):
        pytest.skip(f"the native extension is not built, or this CPU has no {level}")
    for model in MODELS:
        case = Case(model, dtype, 31, num_requests=12, cpu_isa=level)
        serve_and_check(case, Policy("continuous", "fcfs", 48))


@pytest.mark.parametrize("kv_dtype", ["int8", "int8/int4", "int4"])
@pytest.mark.parametrize("level", [*map(at_level, backends("attention"))])
def test_a_cache_of_codes_is_exact_too(level: str, kv_dtype: str) -> None:
    for model in ("llama", "sliding"):
        case = Case(model, "bfloat16", 41, num_requests=12, cpu_isa=level, kv_dtype=kv_dtype)
        serve_and_check(case, Policy("continuous", "fcfs", 48))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["llama", "sliding", "post_norm", "moe"])
def test_replayed_steps_equal_plain_ones(model: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone every step is replayed from a tape (`kernels.tape`); together, here, none is."""
    level = next((level for level in NATIVE_LEVELS if level in backends("linear")), None)
    if level is None:
        pytest.skip("the native extension is not built")
    case = Case(model, dtype, 41, num_requests=12, cpu_isa=level)
    truth_of(case)
    monkeypatch.setattr(ModelRunner, "record", lambda self, buffers: None)
    serve_and_check(case, Policy("continuous", "fcfs", 48))


@pytest.mark.parametrize("dtype", DTYPES)
def test_stories260k(dtype: str, shared_data: Path) -> None:
    case = Case(str(shared_data / "models" / "stories260K" / "hf"), dtype, 51, num_requests=20)
    serve_and_check(case, Policy("continuous", "longest-prefix", 48))


def test_quill() -> None:
    try:
        folder = quill_path("quill")
    except ModelLoadError as error:
        pytest.skip(str(error))
    case = Case(str(folder), "bfloat16", 52, num_requests=12)
    serve_and_check(case, Policy("continuous", "shortest-first", 256))


@pytest.mark.parametrize(
    ("level", "dtype", "kv_dtype", "quantize"),
    [
        at_level(level, level, *kind)
        for level in backends("linear")
        for kind in (
            ("bfloat16", None, ""),
            ("bfloat16", "int8", ""),
            ("bfloat16", "int4", ""),
            ("bfloat16", None, "int8"),
            ("bfloat16", None, "int4"),
        )
    ],
)
@pytest.mark.parametrize("model", ["llama", "sliding"])
def test_drafts_are_exact_in_every_format(
    model: str, level: str, dtype: str, kv_dtype: str | None, quantize: str
) -> None:
    """Rows of several positions of a sequence have the bits of one row per step."""
    case = Case(
        model, dtype, 36, num_requests=8, cpu_isa=level, kv_dtype=kv_dtype, quantize=quantize, max_output=30
    )
    tally = serve_and_check(case, Policy("continuous", "fcfs", 48, "oracle")).tally
    assert tally.num_accepted > 20
    assert tally.num_rejected > 5


@pytest.mark.parametrize("quantize", ["int8", "int4", "int4-g64"])
@pytest.mark.parametrize("level", [*map(at_level, ("reference", *NATIVE_LEVELS))])
def test_quantized_weights_are_exact_too(level: str, quantize: str) -> None:
    """Groups of 32 and 64 inputs do not divide 44 and 75: the last one of each row is short.

    The widths of the last models are those that are rotated.
    """
    if level not in backends("linear"):
        pytest.skip(f"the native extension is not built, or this CPU has no {level}")
    models = ("llama", "even") if level == "reference" else ("llama", "moe", "post_norm", "even", "even_moe")
    for model in models:
        case = Case(model, "bfloat16", 33, num_requests=8, cpu_isa=level, quantize=quantize)
        serve_and_check(case, Policy("continuous", "fcfs", 48))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 106))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_more_seeds(model: str, dtype: str, seed: int) -> None:
    case = Case(model, dtype, seed, max_prompt=150, max_output=40)
    for policy in POLICIES[seed % 6 :: 6]:
        serve_and_check(case, policy)
