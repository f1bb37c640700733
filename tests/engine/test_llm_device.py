"""`LLM(device="interpret")`: a GPU's whole path except for the GPU, on a small model with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.models.hub import quill_path

pytest.importorskip("triton", reason="the kernels of a GPU need Triton")
pytestmark = [
    pytest.mark.triton_interpret,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.component,
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SHORT = [{"prompt_token_ids": [7, 300, 41]}, {"prompt_token_ids": [9, 8]}]
PROMPTS = [{"prompt_token_ids": [3 + i * (j + 2) % 200 for i in range(20)]} for j in range(3)]


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Quill's tokenizer, and the configuration of a model of two small layers."""
    source = quill_path("quill")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / name)
    size = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 512}  # fmt: skip
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **size}))
    return tmp_path


def make(small: Path, **settings: Any) -> LLM:
    """Random weights in fp32, where the order of a sum hardly ever changes a token."""
    asked = {"num_kv_blocks": 64, "max_model_len": 128, "dtype": "float32", **settings}
    return LLM(str(small), load_format="random", seed=5, **asked)


def test_greedy_tokens_are_those_of_the_cpu(small: Path) -> None:
    short = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with make(small, cpu_isa="reference", threads=1) as cpu:
        expected = tokens(cpu.generate(SHORT, short, False))
    with make(small, device="interpret") as device:
        assert tokens(device.generate(SHORT, short, False)) == expected


@pytest.mark.slow
def test_preempted_cached_and_chunked_are_equal(small: Path) -> None:
    """In bf16, where another order of a sum would soon change a token."""
    bf16 = {"dtype": "bfloat16", "device": "interpret", "batch_invariant": True, "max_model_len": 48}
    with make(small, **bf16) as roomy:
        alone = [tokens(roomy.generate([prompt], GREEDY, False))[0] for prompt in PROMPTS]
        again = roomy.generate(PROMPTS, GREEDY, False)
        assert tokens(again) == alone
        assert all(output.num_cached_tokens for output in again), "whole blocks of the prompts are cached"
    tight = {**bf16, "num_kv_blocks": 5, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    longer = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    with make(small, **tight) as small:
        together = small.generate(PROMPTS, longer, False)
        assert [ids[:4] for ids in tokens(together)] == alone
