"""Drive a real worker with hand-made `StepPlan`s, and transformers on the same tokens.

The batch is ragged: sequences of unequal prompts join over the first steps, prompts go in chunks, and single tokens of
others run in the same steps. Blocks are dealt from a shuffled pool, so tables are never in order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quire.clock import VirtualClock
from quire.config import (
    CacheConfig,
    DeviceInfo,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from quire.models.checkpoint import describe
from quire.models.loader import iter_weights
from quire.request import Adapter, SamplingParams
from quire.runner.worker import Worker
from quire.step import AdapterMove, NewSeq, SeqPlan, StepPlan

TOLERANCE = 1e-4
SEED = 1  # of the prompts
VOCAB = 199
BLOCK_SIZE = 8
NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 13, 29, 47, 83)
CHUNK = 7


@dataclass
class Run:
    """What came out for each sequence: its tokens, and the logits that each was chosen from."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[list[torch.Tensor]] = field(default_factory=list)  # rows [vocab_size]


def check(folder: Path, model: torch.nn.Module, max_model_len: int, *, distinct: int = 12) -> Run:
    """Run the ragged batch of a checkpoint, compare with the oracle, and make sure that it says something."""
    run = run_ragged(folder, prompts_of(VOCAB, SEED), max_model_len)
    error = compare(run, model)
    seen = len({token for tokens in run.tokens for token in tokens})
    print(f"max|Δ logit| / max|logit| = {error:.1e}, {seen} distinct tokens, seed {SEED}")
    assert error <= TOLERANCE
    assert seen >= distinct, "greedy text that repeats itself proves little"
    return run


def make_worker(path: Path, max_model_len: int, num_blocks: int, lora: LoraConfig | None = None) -> Worker:
    """Build the worker of a checkpoint in float32 with the exact kernels of torch."""
    found = describe(path)
    spec = found.spec
    layout = spec.kv_layout(max_model_len)
    config = EngineConfig(
        model=ModelConfig(str(found.path), "parity", spec, "float32", "float32", max_model_len, found.kind),
        kv_layout=layout,
        cache=CacheConfig(
            num_blocks,
            BLOCK_SIZE,
            tuple(group.window for group in layout.groups),
            num_states=len(PROMPT_LENGTHS) if spec.state_layers else 0,
        ),
        scheduler=SchedulerConfig(
            max_model_len=max_model_len, max_loras=0 if lora is None else lora.max_loras
        ),
        runner=RunnerConfig(num_threads=1),
        device=DeviceInfo("cpu", "test", 1, 2**33, 2**33),
        lora=lora,
    )
    return Worker(config, iter_weights(config.model, torch.float32), VirtualClock())


def prompts_of(vocab_size: int, seed: int, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def lora_config(max_loras: int, adapters: Sequence[Adapter]) -> LoraConfig:
    """Return slots with room for each of ``adapters``."""
    saved = {name for adapter in adapters for name in adapter.saved}
    return LoraConfig(max_loras, max(adapter.rank for adapter in adapters), saved=tuple(saved))


def run_ragged(
    path: Path,
    prompts: list[list[int]],
    max_model_len: int,
    *,
    new_tokens: int = NEW_TOKENS,
    seed: int = 0,
    adapters: Sequence[Adapter | None] = (),
) -> Run:
    """Generate greedily for all prompts at once, in chunks of `CHUNK`; each with its one of ``adapters``, if any."""
    num_groups = len(describe(path).spec.kv_layout(max_model_len).groups)
    per_sequence = -(-max_model_len // BLOCK_SIZE)
    num_blocks = num_groups * per_sequence * len(prompts) + 1
    loads = tuple(AdapterMove(slot, each) for slot, each in enumerate(adapters, 1) if each is not None)
    slots = [0 if each is None else slot for slot, each in enumerate(adapters, 1)] or [0] * len(prompts)
    lora = lora_config(len(slots), [each for _, each in loads]) if loads else None
    worker = make_worker(path, max_model_len, num_blocks, lora)
    pool = list(range(num_blocks))
    random.Random(seed).shuffle(pool)
    run = Run(prompts, [[] for _ in prompts], [[] for _ in prompts])
    worker.runner.observe_logits = lambda seq_id, position, row: run.logits[seq_id].append(row.clone())
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, seed=0)
    computed = [0] * len(prompts)
    blocks = [0] * len(prompts)
    step = 0
    while True:
        new_seqs, plans = [], []
        for seq_id, prompt in enumerate(prompts):
            known = len(prompt) + len(run.tokens[seq_id])
            if len(run.tokens[seq_id]) == new_tokens or step < seq_id:  # sequence i joins at step i
                continue
            if step == seq_id:
                new_seqs.append(
                    NewSeq(seq_id, 1, tuple(prompt), (), sampling, 0, slots[seq_id], state_slot=seq_id)
                )
            count = min(CHUNK, known - computed[seq_id])
            need = -(-(computed[seq_id] + count) // BLOCK_SIZE) - blocks[seq_id]
            ids = tuple(tuple(pool.pop() for _ in range(need)) for _ in range(num_groups))
            start = (blocks[seq_id],) * num_groups
            change = (start, ids) if need else ((), ())
            plans.append(SeqPlan(seq_id, 1, computed[seq_id], count, *change))
            computed[seq_id] += count
            blocks[seq_id] += need
        if not plans:
            return run
        moves = loads if step == 0 else ()
        result = worker.execute(StepPlan(step, tuple(new_seqs), tuple(plans), adapter_moves=moves))
        for item in result.seqs:
            assert item.error is None, item.error
            run.tokens[item.seq_id].extend(item.token_ids)
        step += 1


@torch.no_grad()
def compare(run: Run, model: torch.nn.Module) -> float:
    """Check that every token is the oracle's greedy choice; return max|Δ logit| / max|logit| over all rows.

    The oracle sees prompt + generated tokens at once, without a cache: its row i is what token i + 1 is chosen from.
    """
    worst, largest = 0.0, 0.0
    for prompt, tokens, rows in zip(run.prompts, run.tokens, run.logits, strict=True):
        ids = torch.tensor([prompt + tokens[:-1]])
        expected = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        ours = torch.stack(rows)
        assert ours.shape == expected.shape, (ours.shape, expected.shape)
        worst = max(worst, (ours - expected).abs().max().item())
        largest = max(largest, expected.abs().max().item())
        assert tokens == expected.argmax(dim=-1).tolist(), f"prompt of {len(prompt)} tokens"
    return worst / largest
