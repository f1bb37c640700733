"""A case (model, dtype, kernels, traffic), what its sequences give alone, and the comparison with a run together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.exact.alone import AloneDriver
from tests.exact.engine_run import INJECTED, Drafting, Ended, EngineRun, Policy, engine_config
from tests.exact.models import KNOWN_MODELS, MAX_MODEL_LEN
from tests.exact.recorder import Draw, Key, recording
from tests.exact.traffic import Job, make_jobs

from quire.config import GATES, ORDERS, EngineConfig, LoraConfig
from quire.executor.base import Executor
from quire.executor.local import LocalExecutor
from quire.kernels.registry import GPU_KERNELS, NATIVE_LEVELS, backends
from quire.models.checkpoint import describe
from quire.modelspec import ModelSpec, weight_shapes
from quire.parallel.rotations import rotated
from quire.request import Adapter, FinishReason
from quire.sampling.draft_tree import Drafts
from quire.speculate.proposer import Wanted
from quire.weight_format import WeightFormat
from quire.weight_plan import parse_format, role_of

BEST = next((level for level in NATIVE_LEVELS if level in backends("linear")), "reference")
# Levels between the one that an engine takes here and AVX2: `tests/kernels` compares the bits of each op of theirs,
# and whole engines at them run under slow.
SELDOM = {"scalar", "avx512_bw", "avx512_vnni", "avx512"} - {BEST}
BUDGETS = (16, 48, 256, 2048)
DRAFTS: tuple[Drafting, ...] = (
    "none",
    "ngram",
    "lookahead",
    "self",
    "other",
    "oracle",
    "medusa",
    "eagle",
    "eagle3",
)
POLICIES = [
    Policy(*triple, DRAFTS[index // 6 % len(DRAFTS)])
    for index, triple in enumerate(itertools.product(GATES, ORDERS, BUDGETS))
]
NUM_TOKENS = {
    "llama": 160,
    "sliding": 256,
    "moe": 160,
    "latent": 160,
    "post_norm": 160,
}  # of the cache: two sequences of the longest kind do not fit


def at_level(level: str, *values: Any) -> Any:
    """Return a test's parameters, ``level`` if there are no ``values``, marked slow at a level that is seldom taken."""
    return pytest.param(*(values or (level,)), marks=[pytest.mark.slow] * (level in SELDOM))


@dataclass(frozen=True, slots=True)
class Case:
    """A model (of `MODELS`, or a checkpoint's folder), a dtype, kernels, and the seed of its traffic."""

    model: str
    dtype: str
    seed: int
    num_requests: int = 64
    cpu_isa: str = "reference"
    kv_dtype: str | None = None
    max_prompt: int = 80
    max_output: int = 14
    quantize: str = ""  # format of every linear, short last groups included; the output matrix is int8
    adapters: tuple[Adapter, ...] = ()  # that requests have, beside the base model
    max_loras: int = 2
    # All requests arrive at once, run together (with blocks for all) and sample ``max_output`` tokens each.
    crowd: bool = False

    def __str__(self) -> str:
        quantized = f"-{self.quantize}" if self.quantize else ""
        adapted = f"-{len(self.adapters)} adapters" if self.adapters else ""
        return f"{Path(self.model).name}-{self.dtype}{quantized}{adapted}-{self.cpu_isa}-seed{self.seed}"

    @property
    def block_size(self) -> int:
        """16 where the cache may lie in tiles, else a size that it may not."""
        return 16 if self.dtype == "bfloat16" else 8

    @property
    def spec(self) -> ModelSpec:
        return KNOWN_MODELS[self.model]() if self.model in KNOWN_MODELS else describe(Path(self.model)).spec

    def config(
        self, num_blocks: int, policy: Policy, *, num_threads: int = 1, max_num_seqs: int = 16
    ) -> EngineConfig:
        config = engine_config(
            self.spec,
            self.dtype,
            path="" if self.model in KNOWN_MODELS else self.model,
            num_blocks=num_blocks,
            block_size=self.block_size,
            policy=policy,
            num_threads=num_threads,
            max_num_seqs=max_num_seqs,
            cpu_isa=self.cpu_isa,
            formats=self.formats,
            kv_dtype=self.kv_dtype,
        )
        if self.on_device:
            config = replace(config, device=replace(config.device, kind="interpret", capability=(9, 0)))
        if not self.adapters:
            return config
        return replace(
            config,
            scheduler=replace(config.scheduler, max_loras=self.max_loras),
            lora=LoraConfig(
                self.max_loras,
                max(adapter.rank for adapter in self.adapters),
                saved=tuple({name for adapter in self.adapters for name in adapter.saved}),
            ),
        )

    @property
    def on_device(self) -> bool:
        return self.cpu_isa in GPU_KERNELS

    def executor(self, config: EngineConfig) -> Executor:
        if not self.on_device:
            return LocalExecutor(config)
        from quire.executor.device import DeviceExecutor

        return DeviceExecutor(config)

    @property
    def formats(self) -> dict[str, WeightFormat]:
        if not self.quantize:
            return {}
        roles = {name: role_of(self.spec, name) for name in weight_shapes(self.spec)}
        held = {
            "linear": parse_format(self.quantize, name="quantize"),
            "head": WeightFormat("int8"),
        }
        formats = {name: held[role] for name, role in roles.items() if role in held}
        return formats if self.on_device else rotated(self.spec, formats, {})


@dataclass(frozen=True, slots=True)
class Truth:
    """What each sequence gives alone."""

    jobs: tuple[Job, ...]
    draws: dict[Key, Draw]
    outputs: dict[tuple[str, int], tuple[tuple[int, ...], FinishReason]]


def deal(cases: list[Case]) -> Iterator[tuple[Case, Policy]]:
    """Deal the policies out to the cases, so that all cases together have each one."""
    for index, policy in enumerate(POLICIES):
        yield cases[index % len(cases)], policy


@cache
def truth_of(case: Case) -> Truth:
    """Run every sequence of the case alone, on an engine with room for one."""
    jobs = make_jobs(
        case.seed,
        case.num_requests,
        case.spec.vocab_size,
        case.spec.eos_token_ids,
        max_prompt=case.max_prompt,
        max_output=case.max_output,
        adapters=case.adapters,
    )
    if case.crowd:
        jobs = [_crowded(job, case.max_output) for job in jobs]
    config = case.config(2 * MAX_MODEL_LEN // case.block_size + 2, POLICIES[0])
    outputs = {}
    with recording(device=case.on_device) as recorder:
        driver = AloneDriver(case.executor(config), config.kv_layout, case.block_size, MAX_MODEL_LEN)
        for job in jobs:
            for index in range(job.request.sampling.n):
                outputs[job.request.request_id, index] = driver.run(job.request, index)
    return Truth(tuple(jobs), recorder.draws, outputs)


def _crowded(job: Job, max_tokens: int) -> Job:
    """The same request at time 0, for one sequence that neither leaves early nor ends at a stop id."""
    sampling = replace(job.request.sampling, n=1, max_tokens=max_tokens, stop_token_ids=(), eos_token_ids=())
    return Job(replace(job.request, arrival_s=0.0, sampling=sampling), None)


def serve_and_check(
    case: Case,
    policy: Policy,
    *,
    num_threads: int = 1,
    fail_every: int | None = None,
    mover_of: Callable[[Executor], Any] | None = None,
) -> EngineRun:
    """Serve the case's traffic in one engine, all together, and compare with each sequence alone.

    ``fail_every``: every so many steps one fails, at times before and at times after it took effect; sequences may
    then end with an error, and everything else must be as before. ``mover_of``: makes the way to a tier.
    """
    longest = -(-(case.max_prompt + case.max_output) // case.block_size)
    num_blocks = max(NUM_TOKENS.get(case.model, 0) // case.block_size, 2 * longest)
    max_num_seqs = 16
    if case.crowd:
        max_num_seqs = case.num_requests
        num_blocks = 2 * longest * case.num_requests
    config = case.config(num_blocks, policy, num_threads=num_threads, max_num_seqs=max_num_seqs)
    truth = truth_of(case)
    here = f"{case}, {policy}"
    executor = case.executor(config)
    if policy.drafts == "oracle":
        assert isinstance(executor, LocalExecutor)
        executor.worker.draft_with(OracleProposer(truth, case.seed))
    with recording(device=case.on_device) as recorder:
        run = EngineRun(
            config, executor, policy, fail_every, None if mover_of is None else mover_of(executor)
        )
        run.serve(truth.jobs)
    assert not recorder.conflicts, f"{here}: drawn twice and differently: {recorder.conflicts[:5]}"
    draws = recorder.draws
    # With two steps in flight, or with drafts behind its last token, a sequence is sampled past its end.
    if case.on_device or policy.drafts != "none":
        draws = {key: draw for key, draw in draws.items() if key in truth.draws}
    run.tally.num_draws = len(draws)
    other = [key for key, draw in draws.items() if draw.logits_digest != truth.draws[key].logits_digest]
    assert not other, f"{here}: logits of {len(other)} draws differ from alone: {other[:5]}"
    other = [key for key, draw in draws.items() if draw != truth.draws[key]]
    assert not other, f"{here}: equal logits, other samples: {other[:5]}"
    if policy.drafts == "self":
        assert run.tally.num_accepted > 0, here
        assert run.tally.num_rejected == 0, (
            f"{here}: the model disagrees with itself: K or V of drafts are wrong"
        )
    for (request_id, index), ended in run.ended.items():
        _check_client(f"{here}, {request_id}[{index}]", ended, truth.outputs[request_id, index])
    return run


class OracleProposer:
    """Knows what the sequences give alone; each draft is right with probability 0.7."""

    def __init__(self, truth: Truth, seed: int) -> None:
        self._random = random.Random(seed)
        prompts = {job.request.request_id: job.request.prompt_token_ids for job in truth.jobs}
        self._texts = [(*prompts[name], *output) for (name, _), (output, _) in truth.outputs.items()]

    def begin(self) -> None:
        """Nothing is remembered of a sequence."""

    def propose(self, wanted: list[Wanted]) -> list[Drafts]:
        return [self._propose(each) for each in wanted]

    def _propose(self, wanted: Wanted) -> Drafts:
        known = tuple(wanted.token_ids.tolist())
        size = len(known)
        rest = next((text[size:] for text in self._texts if text[:size] == known), ())
        paths = [
            [token if self._random.random() < 0.7 else 5 for token in rest[: wanted.limit]]
            for _ in range(self._random.randint(1, wanted.max_paths))
        ]
        return Drafts.from_paths(paths, wanted.limit)


def _check_client(name: str, ended: Ended, alone: tuple[tuple[int, ...], FinishReason]) -> None:
    """The stream of events told the client the same tokens and the same end."""
    output, reason = alone
    assert ended.reason is not None, f"{name}: no terminal event"
    if ended.reason is FinishReason.ERROR:
        assert ended.error == INJECTED, f"{name}: {ended.error}"
    if ended.reason in (FinishReason.ABORT, FinishReason.ERROR):
        assert tuple(ended.token_ids) == output[: len(ended.token_ids)], name
    else:
        assert (tuple(ended.token_ids), ended.reason) == (output, reason), name
