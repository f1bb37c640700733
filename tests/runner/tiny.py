"""Tiny models of several kinds, and a driver that plays the scheduler: it plans steps and hands out blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from tests.kernels.checks import runner_config

from quire.config import (
    CacheConfig,
    DeviceInfo,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from quire.executor.local import LocalExecutor
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, weight_shapes
from quire.request import SamplingParams
from quire.rope_spec import RopeSpec
from quire.step import KvMove, NewSeq, SeqPlan, SeqResult, StepPlan, StepResult

SEED = 20261120
VOCAB = 131
MAX_LEN = 256
GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=64)


def llama(num_layers: int = 2) -> ModelSpec:
    attention = AttentionSpec(4, 2, 12, 12, 12**-0.5, RopeSpec(1e4, 12))
    return ModelSpec(
        "llama",
        "LlamaForCausalLM",
        VOCAB,
        48,
        (LayerSpec(attention, MlpSpec(80)),) * num_layers,
        1e-5,
        MAX_LEN,
    )


def windows() -> ModelSpec:
    """Gemma-like: alternating windows (two cache groups), sandwich norms, caps, q/k norm, tied, scaled."""
    full = AttentionSpec(4, 2, 12, 12, 0.3, RopeSpec(1e4, 12), soft_cap=20.0, qk_norm="head")
    layers = tuple(
        LayerSpec(replace(full, window=None if i % 2 else 24), MlpSpec(80, "gelu_tanh"), "sandwich")
        for i in range(4)
    )
    return ModelSpec(
        "gemma", "G", VOCAB, 48, layers, 1e-6, MAX_LEN, tie_word_embeddings=True, norm_plus_one=True,
        embedding_scale=48**0.5, logits_soft_cap=15.0,
    )  # fmt: skip


def mixture() -> ModelSpec:
    """gpt-oss-like: sinks, biases, windows, biased experts."""
    attention = AttentionSpec(
        6, 2, 8, 8, 8**-0.5, RopeSpec(1e4, 8), window=24, qkv_bias=True, o_bias=True, sinks=True
    )
    moe = MoeSpec(4, 2, 40, scoring="softmax_after_topk", router_bias=True, expert_bias=True)
    layers = tuple(
        LayerSpec(replace(attention, window=24 if i % 2 else None), MlpSpec(40, "swiglu_oai", moe=moe))
        for i in range(2)
    )
    return ModelSpec("gpt_oss", "G", VOCAB, 48, layers, 1e-5, MAX_LEN)


def latent() -> ModelSpec:
    """DeepSeek-like: MLA with low-rank q, grouped sigmoid routing, a shared expert, OLMo-like second layer norms."""
    attention = AttentionSpec(
        4, 4, 20, 10, 20**-0.5, RopeSpec(1e4, 8, interleaved=True), q_lora_rank=24, kv_lora_rank=28,
        qk_nope_head_dim=12,
    )  # fmt: skip
    moe = MoeSpec(
        8, 3, 24, scoring="sigmoid", routed_scale=2.5, correction_bias=True, num_groups=4, topk_groups=2,
        group_score="top2_sum", shared_intermediate_size=32, shared_gate=True,
    )  # fmt: skip
    layers = (LayerSpec(attention, MlpSpec(80)), LayerSpec(attention, MlpSpec(24, moe=moe), "post"))
    return ModelSpec("deepseek", "D", VOCAB, 48, layers, 1e-6, MAX_LEN, residual_scale=0.8)


SPECS = {"llama": llama(), "windows": windows(), "mixture": mixture(), "latent": latent()}


def weights(spec: ModelSpec, seed: int = SEED) -> list[tuple[str, torch.Tensor]]:
    """Weights large enough that attention and routing matter (std 0.3, norms near 1)."""
    rng = torch.Generator().manual_seed(seed)
    made = []
    for name, shape in weight_shapes(spec).items():
        tensor = torch.randn(shape, generator=rng) * 0.3
        made.append(
            (name, tensor + 1.0 if name.endswith("norm.weight") and not spec.norm_plus_one else tensor)
        )
    return made


def engine_config(
    spec: ModelSpec,
    dtype: str = "float32",
    *,
    num_blocks: int = 128,
    block_size: int = 16,
    isa: str = "reference",
) -> EngineConfig:
    layout = spec.kv_layout(MAX_LEN)
    return EngineConfig(
        model=ModelConfig("", "tiny", spec, dtype, dtype, MAX_LEN, "random"),
        kv_layout=layout,
        cache=CacheConfig(num_blocks, block_size, tuple(group.window for group in layout.groups)),
        scheduler=SchedulerConfig(max_num_seqs=8, max_model_len=MAX_LEN),
        runner=runner_config(isa),
        device=DeviceInfo("cpu", "test", 2, 1 << 34, 1 << 33),
    )


@dataclass
class Known:
    """What the driver knows of a sequence."""

    prompt: tuple[int, ...]
    output: list[int] = field(default_factory=list)
    computed: int = 0
    epoch: int = 0
    blocks: list[list[int]] = field(default_factory=list)


class Driver:
    """Plays scheduler and cache for a `LocalExecutor`; records every row of logits by (sequence, position)."""

    def __init__(self, config: EngineConfig, *, seed: int = SEED, shuffle: bool = False) -> None:
        self.config = config
        self.executor = LocalExecutor(config, weights=weights(config.model.spec))
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self.executor.worker.runner.observe_logits = self._observe
        self.seqs: dict[int, Known] = {}
        self.free = list(range(config.cache.num_blocks))
        if shuffle:
            random.Random(seed).shuffle(self.free)
        self._new: list[NewSeq] = []
        self._gone: list[int] = []
        self.moves: list[KvMove] = []
        self._sent: dict[int, list[int]] = {}
        self._step = 0

    def _observe(self, seq_id: int, position: int, row: torch.Tensor) -> None:
        self.logits[seq_id, position] = row.clone()

    def add(
        self, seq_id: int, prompt: Sequence[int], output: Sequence[int] = (), *, epoch: int = 0,
        sampling: SamplingParams = GREEDY,
    ) -> Known:  # fmt: skip
        groups = len(self.config.kv_layout.groups)
        known = Known(tuple(prompt), list(output), 0, epoch, [[] for _ in range(groups)])
        self.seqs[seq_id] = known
        self._sent[seq_id] = [0] * groups
        self._new.append(NewSeq(seq_id, epoch, known.prompt, tuple(output), sampling, 0))
        return known

    def drop(self, seq_id: int) -> None:
        known = self.seqs.pop(seq_id)
        for rows in known.blocks:
            self.free.extend(rows)
        self._gone.append(seq_id)

    def step(self, *chunks: tuple[int, int]) -> StepResult:
        """Compute (sequence, number of rows) together; sampled tokens are appended. Fails on a step's error."""
        result = self.try_step(*chunks)
        assert result.error is None, result.error
        return result

    def try_step(self, *chunks: tuple[int, int]) -> StepResult:
        plans = tuple(self._plan(seq_id, rows) for seq_id, rows in chunks)
        plan = StepPlan(self._step, tuple(self._new), plans, tuple(self._gone), tuple(self.moves))
        self._new, self._gone, self.moves = [], [], []
        self._step += 1
        self.executor.submit(plan)
        result = self.executor.collect()
        for item in result.seqs:
            self._take(item)
        return result

    def _plan(self, seq_id: int, rows: int) -> SeqPlan:
        known = self.seqs[seq_id]
        total = known.computed + rows
        need = -(-total // self.config.cache.block_size)
        for table in known.blocks:
            while len(table) < need:
                table.append(self.free.pop(0))
        starts = tuple(self._sent[seq_id])
        ids = tuple(tuple(table[start:]) for table, start in zip(known.blocks, starts, strict=True))
        self._sent[seq_id] = [len(table) for table in known.blocks]
        plan = SeqPlan(seq_id, known.epoch, known.computed, rows, starts, ids)
        if not any(ids):
            plan = plan._replace(block_start=(), new_block_ids=())
        known.computed = total
        return plan

    def _take(self, item: SeqResult) -> None:
        if item.seq_id in self.seqs:
            self.seqs[item.seq_id].output.extend(item.token_ids)

    def generate(self, seq_id: int, steps: int, chunk: int | None = None) -> list[int]:
        """Run one sequence alone: its prompt in chunks, then ``steps`` tokens in all."""
        known = self.seqs[seq_id]
        while len(known.output) < steps:
            left = len(known.prompt) + len(known.output) - known.computed
            (result,) = self.step((seq_id, min(left, chunk or left))).seqs
            assert result.error is None, result.error
        return known.output


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(SEED + seed)
    return [rng.randrange(VOCAB) for _ in range(length)]
