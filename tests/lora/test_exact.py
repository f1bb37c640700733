"""Three adapters and the base model in random traffic over two slots: each sequence as it is alone, bit for bit.

Alone, an adapter lies in slot 1 and nothing else runs; together it lies wherever there was room, is thrown out and
loaded again, and its sequences are cached, forked, preempted and chunked beside those of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.exact.engine_run import Policy, Tally
from tests.exact.models import KNOWN_MODELS, MODELS
from tests.exact.suite import BEST, Case, at_level, serve_and_check, truth_of
from tests.lora.peft_files import make_adapters, make_end_adapters

from quire.kernels.registry import NATIVE_LEVELS, backends
from quire.models import loader
from quire.request import Adapter
from quire.runner.model_runner import ModelRunner

LEVELS = ("reference", *(level for level in NATIVE_LEVELS if level in backends("linear")))
POLICY = Policy("continuous", "fcfs", 48)


@pytest.fixture(autouse=True)
def lively_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "STD", 0.3)


def case_of(folder: Path, model: str, seed: int, dtype: str, level: str, **more: object) -> Case:
    adapters = make_adapters(folder, KNOWN_MODELS[model]())
    return Case(model, dtype, seed, cpu_isa=level, adapters=adapters, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [make_adapters, make_end_adapters])
def test_the_traffic_covers_what_it_claims(make: Callable[..., tuple[Adapter, ...]], tmp_path: Path) -> None:
    """Slots are fought for, and adapters make a difference."""
    adapters = make(tmp_path, MODELS["llama"]())
    case = Case("llama", "float32", 42, cpu_isa=BEST, adapters=adapters, num_requests=48)
    tally = Tally()
    for policy in (POLICY, Policy("static", "priority", 256), Policy("dynamic", "longest-prefix", 16)):
        tally += serve_and_check(case, policy).tally
    assert tally.num_preemptions > 0, tally
    assert tally.num_forks > 0, tally
    assert tally.num_cached_tokens > 0, tally
    assert tally.num_adapter_loads > 3 * len(case.adapters), tally
    with_adapters = truth_of(case).outputs
    base = truth_of(Case("llama", "float32", 42, num_requests=48, cpu_isa=BEST)).outputs
    adapted = {job.request.request_id for job in truth_of(case).jobs if job.request.adapter is not None}
    for key, output in with_adapters.items():
        if key[0] not in adapted:
            assert output == base[key], f"{key}: the base model beside adapters is not the base model"
    assert sum(with_adapters[key] != base[key] for key in base if key[0] in adapted) > len(adapted) / 2


@pytest.mark.parametrize("level", [*map(at_level, LEVELS)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_level(level: str, dtype: str, tmp_path: Path) -> None:
    """The reference is slow, and has no threads of its own."""
    few = level == "reference"
    case = case_of(tmp_path, "llama", 31, dtype, level, num_requests=4 if few else 12)
    serve_and_check(case, POLICY, num_threads=1 if few else 2)


@pytest.mark.parametrize("level", [*map(at_level, LEVELS)])
def test_changed_ends_and_dora_at_every_level(level: str, tmp_path: Path) -> None:
    """LoRA of the embedding and the output matrix, whole ones, and a DoRA, two of three in a step."""
    few = level == "reference"
    adapters = make_end_adapters(tmp_path, MODELS["llama"]())
    case = Case("llama", "bfloat16", 36, cpu_isa=level, adapters=adapters, num_requests=4 if few else 12)
    run = serve_and_check(case, POLICY, num_threads=1 if few else 2)
    assert run.tally.num_adapter_loads >= (1 if few else 3)


def test_changed_ends_beside_quantized_weights(tmp_path: Path) -> None:
    """An output matrix in int8; the norms of a DoRA are those of the weights as they are held."""
    adapters = make_end_adapters(tmp_path, MODELS["llama"]())
    level = LEVELS[1 % len(LEVELS)]
    case = Case("llama", "bfloat16", 37, cpu_isa=level, adapters=adapters, num_requests=12, quantize="int8")
    serve_and_check(case, POLICY)


def test_latent_attention(tmp_path: Path) -> None:
    """Parts of other kinds: q_a and kv_a in one, q_b, o."""
    serve_and_check(
        case_of(tmp_path, "latent", 32, "bfloat16", LEVELS[1 % len(LEVELS)], num_requests=12), POLICY
    )


@pytest.mark.parametrize(("model", "quantize"), [("llama", "int8"), ("llama", "int4"), ("even", "int8")])
def test_beside_quantized_weights(model: str, quantize: str, tmp_path: Path) -> None:
    """Adapters read the rows as they are before a rotation."""
    level = LEVELS[1 % len(LEVELS)]
    serve_and_check(
        case_of(tmp_path, model, 33, "bfloat16", level, num_requests=12, quantize=quantize), POLICY
    )


@pytest.mark.parametrize("make", [make_adapters, make_end_adapters])
def test_replayed_steps_equal_plain_ones(
    make: Callable[..., tuple[Adapter, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With changed ends too: they are cut out of the recording, and run between its parts."""
    if len(LEVELS) == 1:
        pytest.skip("the native extension is not built")
    adapters = make(tmp_path, MODELS["llama"]())
    case = Case("llama", "bfloat16", 34, cpu_isa=LEVELS[1], adapters=adapters, num_requests=12)
    truth_of(case)
    monkeypatch.setattr(ModelRunner, "record", lambda self, buffers: None)
    serve_and_check(case, POLICY)


def test_failed_steps_leave_no_trace(tmp_path: Path) -> None:
    """A step that the worker never saw had adapters to load: they are loaded with the next."""
    case = case_of(tmp_path, "llama", 35, "float32", BEST, num_requests=40)
    run = serve_and_check(case, Policy("continuous", "priority", 40), fail_every=7)
    assert run.tally.num_failures >= 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 208))
def test_more_seeds(seed: int, tmp_path: Path) -> None:
    level = LEVELS[seed % len(LEVELS)]
    case = case_of(tmp_path, "llama", seed, ("float32", "bfloat16")[seed % 2], level, max_loras=1 + seed % 3)
    serve_and_check(case, Policy("continuous", ("fcfs", "priority")[seed % 2], (16, 48, 256)[seed % 3]))


@pytest.mark.parametrize("drafts", ["eagle", "eagle3"])
def test_beside_heads_that_read_hidden_states(drafts: str, tmp_path: Path) -> None:
    """For EAGLE the last layer computes all tokens, also those that give no logits."""
    case = case_of(tmp_path, "llama", 34, "bfloat16", LEVELS[1 % len(LEVELS)], num_requests=12)
    tally = serve_and_check(case, Policy("continuous", "fcfs", 48, drafts)).tally  # type: ignore[arg-type]
    assert tally.num_rejected > 20
