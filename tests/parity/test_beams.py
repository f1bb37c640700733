"""Beam search of the whole engine (scheduler, cache, worker) gives transformers' answers, token for token."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.exact.engine_run import Policy, engine_config
from tests.fakes.integrity import check_integrity
from tests.parity.families import make
from tests.parity.harness import VOCAB

from quire.clock import VirtualClock
from quire.engine.core import EngineCore
from quire.executor.local import LocalExecutor
from quire.models.checkpoint import describe
from quire.request import Request, SamplingParams
from quire.scheduler.scheduler import Scheduler

SEED = 20261121
CASES: list[dict[str, Any]] = [
    {"num_beams": 4},
    {"num_beams": 5, "num_return_sequences": 3},
    {"num_beams": 3, "length_penalty": 0.0, "early_stopping": True},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never", "num_return_sequences": 4},
    {"num_beams": 3, "length_penalty": -1.0},
    {"num_beams": 2, "early_stopping": "never", "num_return_sequences": 2},
    {"num_beams": 6, "length_penalty": 0.7, "num_return_sequences": 2},
]
MAX_TOKENS = 18


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beams")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return make("llama", folder, seed=3)


def requests(ends: Sequence[int]) -> list[tuple[Request, dict[str, Any]]]:
    rng = random.Random(SEED)
    made = []
    for index, case in enumerate(CASES * 2):
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30)))
        sampling = SamplingParams(
            n=case.get("num_return_sequences", 1),
            best_of=case["num_beams"],
            use_beam_search=True,
            length_penalty=case.get("length_penalty", 1.0),
            early_stopping=case.get("early_stopping", False),
            max_tokens=MAX_TOKENS,
            eos_token_ids=tuple(ends),
            seed=0,
        )
        made.append((Request(f"r{index}", prompt, sampling, arrival_s=index / 100), case))
    return made


def run(folder: Path, asked: Sequence[Request], num_blocks: int, budget: int, max_num_seqs: int) -> Any:
    config = engine_config(
        describe(folder).spec,
        "float32",
        path=str(folder),
        num_blocks=num_blocks,
        block_size=4,
        policy=Policy("continuous", "fcfs", budget),
        max_num_seqs=max_num_seqs,
        max_model_len=64,
    )
    scheduler = Scheduler(config.scheduler, config.cache)
    core = EngineCore(scheduler, LocalExecutor(config), VirtualClock())
    for one in asked:
        core.put(one)
    tokens: dict[str, dict[int, list[int]]] = defaultdict(dict)
    while core.has_work:
        for event in core.step():
            assert event.error is None, event.error
            tokens[event.request_id][event.sample_index] = list(event.token_ids)
        check_integrity(scheduler)
    return tokens, scheduler.stats()


# Enough of everything; and so little that beams are preempted, forked late, and take turns for seats.
@pytest.mark.parametrize(("num_blocks", "budget", "max_num_seqs"), [(1000, 256, 64), (24, 11, 5)])
@pytest.mark.parametrize("num_ends", [1, 20])
def test_beams_are_those_of_transformers(
    folder: Path, model: Any, num_ends: int, num_blocks: int, budget: int, max_num_seqs: int
) -> None:
    ends = random.Random(SEED + num_ends).sample(range(3, VOCAB), num_ends)
    asked = requests(ends)
    tokens, stats = run(folder, [one for one, _ in asked], num_blocks, budget, max_num_seqs)
    num_short = 0
    for one, case in asked:
        ids = torch.tensor([one.prompt_token_ids])
        with torch.inference_mode():
            rows = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=ends,
                pad_token_id=0,
                **case,
            )
        for index, row in enumerate(rows[:, ids.shape[1] :].tolist()):
            length = next((i + 1 for i, token in enumerate(row) if token in ends), MAX_TOKENS)
            num_short += length < MAX_TOKENS
            assert tokens[one.request_id][index] == row[:length], (one.request_id, index)
    assert num_short or num_ends == 1, "some answers end by a stop id"
    assert (stats.num_preemptions > 0) == (num_blocks == 24)
