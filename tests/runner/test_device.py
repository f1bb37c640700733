"""The runner of a GPU, in Triton's interpreter: whole engines with two steps in flight against the CPU reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.fakes.integrity import check_integrity
from tests.kernels.triton.device import DEVICE, WARNINGS
from tests.lora.peft_files import make_adapters, make_end_adapters
from tests.runner.tiny import GREEDY, SEED, VOCAB, engine_config, llama, weights
from tests.runner.tiny import SPECS as ALL_SPECS

from quire.clock import VirtualClock
from quire.config import DeviceInfo, EngineConfig, LoraConfig
from quire.engine.core import EngineCore
from quire.executor.device import DeviceExecutor
from quire.executor.local import LocalExecutor
from quire.modelspec import ModelSpec
from quire.request import Adapter, FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from quire.scheduler.scheduler import Scheduler
from quire.step import StepResult
from quire.weight_plan import plan_weights

pytestmark = [WARNINGS, pytest.mark.gpu if DEVICE.type == "cuda" else pytest.mark.triton_interpret]
SPECS = {**ALL_SPECS, "llama": llama(1)}  # one layer: a step of it takes a tenth of a second
KIND = "cuda" if DEVICE.type == "cuda" else "interpret"


def device_config(name: str, kernels: str, **changes: int) -> EngineConfig:
    config = engine_config(SPECS[name], isa=kernels, **changes)
    return replace(config, device=DeviceInfo(KIND, "test", 2, 1 << 34, 1 << 33, capability=(9, 0)))  # type: ignore[arg-type]


def requests(count: int, sampling: SamplingParams, *, seed: int = 0, length: int = 40) -> list[Request]:
    rng = random.Random(SEED + seed)
    return [
        Request(
            f"r{i}",
            tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(3, length))),
            replace(sampling, seed=i),
            0.0,
        )
        for i in range(count)
    ]


def generate(
    config: EngineConfig, asked: Sequence[Request], *, together: int, executor: type = DeviceExecutor
) -> dict[str, list[int]]:
    """Run ``asked``, ``together`` at a time; return the tokens by request."""
    run = executor(config, clock=VirtualClock(), weights=weights(config.model.spec))
    core = EngineCore(Scheduler(config.scheduler, config.cache), run, VirtualClock())
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    waiting, running = list(asked), 0
    while waiting or running:
        while waiting and running < together:
            core.put(waiting.pop(0))
            running += 1
        for event in core.step():
            assert isinstance(event, TokenEvent)
            assert event.finish_reason is not FinishReason.ERROR, event.error
            tokens[event.request_id].extend(event.token_ids)
            running -= event.finish_reason is not None
        check_integrity(core.scheduler)
    core.executor.close()
    return tokens


SHORT = replace(GREEDY, max_tokens=4)
RANDOM = SamplingParams(temperature=0.8, min_p=0.02, max_tokens=4, seed=1)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(name, kernels, marks=() if (name, kernels) == ("llama", "triton") else pytest.mark.slow)
        for name in SPECS
        for kernels in ("triton", "invariant")
    ],
)
@pytest.mark.parametrize(
    "sampling", [pytest.param(SHORT, marks=pytest.mark.slow), RANDOM], ids=["greedy", "random"]
)
def test_tokens_are_those_of_the_cpu(name: str, kernels: str, sampling: SamplingParams) -> None:
    """fp32, so that two ways to add up a row hardly ever choose another token."""
    asked = requests(3, sampling, length=20)
    expected = generate(engine_config(SPECS[name]), asked, together=1, executor=LocalExecutor)
    assert generate(device_config(name, kernels), asked, together=3) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_fp8_weights_give_the_logits_of_the_reference(name: str) -> None:
    """Nearly: where sums round otherwise a number may become its neighbour in fp8, a sixteenth away."""
    asked = requests(2, replace(GREEDY, max_tokens=1), length=20)
    formats = plan_weights(SPECS[name], {}, "fp8", None).formats
    seen: list[list[torch.Tensor]] = []
    for executor, config in (
        (LocalExecutor, engine_config(SPECS[name])),
        (DeviceExecutor, device_config(name, "triton")),
    ):
        rows: list[torch.Tensor] = []

        class Observed(executor):  # type: ignore[misc, valid-type]
            def __init__(self, *args: object, **named: object) -> None:
                super().__init__(*args, **named)
                self.worker.runner.observe_logits = lambda seq_id, position, row: rows.append(row.clone())  # noqa: B023

        generate(
            replace(config, model=replace(config.model, formats=formats)),
            asked,
            together=1,
            executor=Observed,
        )
        seen.append(rows)
    for expected, row in zip(*seen, strict=True):
        assert (row - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_invariant_logits_have_the_same_bits_in_any_batch(name: str) -> None:
    """Alone and among others, with chunks of 7, few blocks (so that some are preempted), with and without a cache."""
    asked = requests(6, RANDOM, length=60)
    seen: list[dict[tuple[str, int], torch.Tensor]] = []
    for together, chunk, blocks in ((1, 2048, 128), (6, 7, 128), (6, 2048, 18 if name != "windows" else 30)):
        config = device_config(name, "invariant", num_blocks=blocks)
        config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=max(chunk, 8)))
        rows: dict[tuple[str, int], torch.Tensor] = {}

        class Observed(DeviceExecutor):
            def __init__(self, *args: object, **named: object) -> None:
                super().__init__(*args, **named)  # type: ignore[arg-type]
                seqs, runner = self.worker.seqs, self.worker.runner

                def observe(seq_id: int, position: int, row: torch.Tensor) -> None:
                    prompt = tuple(seqs.known_ids(seqs.find(seq_id))[:3].tolist())
                    rows[str(prompt), position] = row.clone()  # noqa: B023  this turn's

                runner.observe_logits = observe

        generate(config, asked, together=together, executor=Observed)
        seen.append(rows)
    for other in seen[1:]:
        assert other.keys() == seen[0].keys()
        for key, row in other.items():
            assert torch.equal(row, seen[0][key]), f"{name} {key} (seed {SEED})"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chunk"), [("llama", 2048), ("llama", 9), ("latent", 9)])
def test_replayed_graphs_draw_the_same(name: str, chunk: int) -> None:
    """Padded batches, replays over buffers of other steps, a sequence that ends in between; chunks beside decode."""
    asked = [
        replace(request, sampling=replace(request.sampling, max_tokens=3 + 2 * i))
        for i, request in enumerate(requests(3, RANDOM, length=24))
    ]
    config = device_config(name, "triton")
    config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=chunk))
    eager = replace(config, runner=replace(config.runner, graphs=False))
    mixed: set[bool] = set()

    class Watched(DeviceExecutor):
        def close(self) -> None:
            graphs = self.worker.runner._graphs
            mixed.update(shape.num_tokens > shape.num_seqs for shape in graphs._graphs)
            super().close()

    drawn = generate(config, asked, together=3, executor=Watched)
    assert drawn == generate(eager, asked, together=3)
    assert mixed == ({False, True} if chunk < 100 else {False}), (
        "mixed steps are captured where they come twice"
    )


def test_rows_that_need_the_host_are_drawn_alike() -> None:
    """Penalties, top_k, logprobs and forbidden ids beside plain rows, with two steps in flight."""
    kinds = [
        replace(RANDOM, presence_penalty=1.5, repetition_penalty=1.2),
        replace(RANDOM, presence_penalty=1.5, repetition_penalty=1.2, repeat_last_n=3),
        replace(RANDOM, top_k=5, top_p=0.8),
        replace(GREEDY, max_tokens=4, logprobs=2),
        RANDOM,
    ]
    asked = [
        replace(request, sampling=replace(kind, seed=i))
        for i, (request, kind) in enumerate(zip(requests(5, RANDOM, length=8), kinds, strict=True))
    ]
    expected = generate(engine_config(SPECS["llama"]), asked, together=1, executor=LocalExecutor)
    assert generate(device_config("llama", "triton"), asked, together=4) == expected


@pytest.mark.slow
def test_rows_that_stay_on_the_device_are_drawn_alike() -> None:
    """top_k, top_p and logprobs with two steps in flight; the logprobs too."""
    kinds = [replace(RANDOM, top_k=5, top_p=0.8), replace(RANDOM, logprobs=3, top_p=0.9), RANDOM]
    asked = [
        replace(request, sampling=replace(kind, seed=i, max_tokens=3))
        for i, (request, kind) in enumerate(zip(requests(3, RANDOM, length=8), kinds, strict=True))
    ]
    seen: list[list[TokenLogprobs]] = []
    tokens = []
    for executor, config, together in (
        (LocalExecutor, engine_config(SPECS["llama"]), 1),
        (DeviceExecutor, device_config("llama", "triton"), 3),
    ):
        found: list[TokenLogprobs] = []

        class Watched(executor):  # type: ignore[misc, valid-type]
            def collect(self) -> StepResult:
                result: StepResult = super().collect()
                for seq in result.seqs:
                    found.extend(seq.logprobs or ())  # noqa: B023
                return result

        tokens.append(generate(config, asked, together=together, executor=Watched))
        seen.append(found)
    assert tokens[1] == tokens[0]
    assert len(seen[0]) == 3
    for ours, expected in zip(seen[1], seen[0], strict=True):
        assert (ours.token_id, ours.rank, ours.top_token_ids) == (
            expected.token_id,
            expected.rank,
            expected.top_token_ids,
        )
        assert ours.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-4)
        assert ours.logprob == pytest.approx(expected.logprob, abs=1e-4)


def test_nothing_is_made_on_a_device_by_default() -> None:
    """A factory call that forgets the device makes tensors of the CPU on a GPU; here they are of no device at all."""
    config = device_config("llama", "triton")
    asked = requests(2, replace(RANDOM, max_tokens=2), length=8)
    expected = generate(config, asked, together=2)
    run = DeviceExecutor(config, clock=VirtualClock(), weights=weights(config.model.spec))
    launch = run.worker.runner.launch

    def launch_on_meta(step):  # type: ignore[no-untyped-def]
        with torch.device("meta"):
            return launch(step)

    run.worker.runner.launch = launch_on_meta  # type: ignore[method-assign]
    assert generate(config, asked, together=2, executor=lambda *_, **__: run) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kernels", "count"),
    [
        ("llama", "triton", 2),
        pytest.param("llama", "invariant", 5, marks=pytest.mark.slow),
        pytest.param("latent", "triton", 3, marks=pytest.mark.slow),
    ],
)
def test_adapters_give_the_tokens_of_the_cpu(name: str, kernels: str, count: int, tmp_path: Path) -> None:
    """Three adapters and the base model over two slots, so that they are loaded between steps in flight."""
    spec = SPECS[name]
    if name == "latent":  # as a family has it whose adapters have names: the tiny one is a mixture of several
        spec = replace(spec, family="deepseek_v3", layers=spec.layers[:1] * 2)
    check_adapters(spec, kernels, count, make_adapters(tmp_path, spec))


def test_changed_ends_and_dora_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    """LoRA of both ends, whole ones, and a DoRA."""
    check_adapters(SPECS["llama"], "triton", 3, make_end_adapters(tmp_path, SPECS["llama"]))


def check_adapters(spec: ModelSpec, kernels: str, count: int, adapters: tuple[Adapter, ...]) -> None:
    """``count`` requests, of three adapters and the base model in turn, over two slots."""
    asked = [
        replace(request, adapter=(*adapters, None)[i % 4])
        for i, request in enumerate(requests(count, replace(SHORT, max_tokens=2), length=6 * (count - 1)))
    ]
    base = engine_config(spec)
    together = replace(engine_config(spec, isa=kernels), device=device_config("llama", kernels).device)
    tokens = []
    for config, executor, most in ((base, LocalExecutor, 1), (together, DeviceExecutor, 3)):
        config = replace(
            config,
            lora=LoraConfig(2, 17, adapters, ("embed_tokens", "lm_head")),
            scheduler=replace(config.scheduler, max_loras=2, max_num_batched_tokens=32),
        )
        tokens.append(generate(config, asked, together=most, executor=executor))
    assert tokens[1] == tokens[0]
    assert tokens[0] != generate(
        base, [replace(each, adapter=None) for each in asked], together=1, executor=LocalExecutor
    )
