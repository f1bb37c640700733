"""Kinds of RoPE against transformers, beyond the original length.

Frequencies are fixed from max_model_len, and transformers is held to the same (docs/models.md, "Rotary embeddings").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parity.families import CASES, CONTEXT, ORIGINAL, ROPES, fix_rope, make
from tests.parity.harness import VOCAB, check, compare, prompts_of, run_ragged

from quire.layers.rope import inverse_frequencies
from quire.models.checkpoint import describe


def rope_changes(kind: str) -> dict[str, Any]:
    changes: dict[str, Any] = {"rope_parameters": {"rope_theta": 10000.0, **ROPES[kind]}}
    if kind == "dynamic":
        changes["max_position_embeddings"] = ORIGINAL
    return changes


@pytest.mark.parametrize("kind", ROPES)
def test_kind(kind: str, tmp_path: Path) -> None:
    model = make("llama", tmp_path, **rope_changes(kind))
    if kind in ("dynamic", "longrope"):
        fix_rope(model, CONTEXT)
    found = describe(tmp_path).spec
    assert found.max_position_embeddings == CONTEXT
    check(tmp_path, model, CONTEXT)
    rope, rotary = found.layers[0].attention.rope, model.model.rotary_emb
    assert rope is not None
    assert torch.allclose(inverse_frequencies(rope, CONTEXT), rotary.inv_freq, rtol=1e-6)
    assert rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_full_context_needs_no_fixing(kind: str, tmp_path: Path) -> None:
    """At exactly max_model_len tokens transformers chooses the frequencies that Quire fixed, by itself."""
    model = make("llama", tmp_path, **rope_changes(kind))
    run = run_ragged(tmp_path, prompts_of(VOCAB, 3, (80,)), 96, new_tokens=17)  # its last row sees 96 tokens
    assert compare(run, model) <= 1e-4


def test_longrope_in_the_original_length_takes_short_factors(tmp_path: Path) -> None:
    model = make("llama", tmp_path, **rope_changes("longrope"))
    run = run_ragged(tmp_path, prompts_of(VOCAB, 3, (1, 9, 16)), ORIGINAL, new_tokens=16)
    assert compare(run, model) <= 1e-4


def test_phi3_with_longrope_and_a_partial_rotation(tmp_path: Path) -> None:
    """The combination of Phi-4-mini; here original_max_position_embeddings stands outside of the RoPE parameters."""
    factors = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.0, 4.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, **factors}
    model = make("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=ORIGINAL)
    fix_rope(model, CONTEXT)
    check(tmp_path, model, CONTEXT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(
    "case", ["mistral", "qwen2", "qwen3", "olmo2", "granite", "smollm3", "mixtral", "qwen2_moe", "qwen3_moe"]
)
def test_every_family_with_every_kind(case: str, kind: str, tmp_path: Path) -> None:
    changes = rope_changes(kind)
    if kind == "longrope":  # a factor for each pair of this family's heads
        pairs = CASES[case][1].get("head_dim", 12) // 2
        for name in ("short_factor", "long_factor"):
            changes["rope_parameters"][name] = (ROPES[kind][name] + [5.5, 6.0])[:pairs]
    model = make(case, tmp_path, **changes)
    if kind in ("dynamic", "longrope"):
        fix_rope(model, CONTEXT)
    check(tmp_path, model, CONTEXT)
