"""Every supported family against transformers, in float32: ≤ 1e-4 of the largest logit, and the same greedy tokens.

The prompts are longer than the window (16) and than the original rotary length (32); 5 ragged sequences in chunks of 7
over shuffled blocks; from one file and from shards.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.parity.families import CASES, CONTEXT, make, make_seeing, rename, save
from tests.parity.harness import SEED, TOLERANCE, VOCAB, check, compare, prompts_of, run_ragged

from quire.families import SUPPORTED, spec_from_config
from quire.models import checkpoint
from quire.modelspec import ModelSpec


@pytest.mark.parametrize("case", CASES)
def test_family(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path / "one")
    one = check(tmp_path / "one", model, CONTEXT)
    save(model, tmp_path / "many", shards=3)
    many = run_ragged(tmp_path / "many", one.prompts, CONTEXT, seed=5)  # other blocks too
    assert many.tokens == one.tokens
    for ours, theirs in zip(one.logits, many.logits, strict=True):
        assert torch.equal(torch.stack(ours), torch.stack(theirs))
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    if config["model_type"] in ("gemma4_text", "lfm3", "nemotron_h", "kimi_linear"):
        return  # they have no rotary embedding, or were never written with the keys of transformers 4
    assert spec_from_config(_as_before_transformers_5(config)) == spec_from_config(config)


@pytest.mark.parametrize("layout", ["transformers 5", "hub"])
@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("gemma3", "Gemma3"),
        ("gemma4", "Gemma4"),
        ("mistral", "Mistral3"),
        ("ministral3", "Mistral3"),
        ("mistral4", "Mistral3"),
    ],
)
def test_the_decoder_of_a_model_that_sees(case: str, kind: str, layout: str, tmp_path: Path) -> None:
    """Whichever of its two names the decoder has in the file; a tower that does not run is left out with a line."""
    model = make_seeing(case, kind, tmp_path)
    if layout == "hub":
        rename(tmp_path / "model.safetensors", "model.language_model.", "language_model.model.")
    found = checkpoint.describe(tmp_path)
    assert found.spec.family == case
    towers = ("vision_tower", "multi_modal_projector")
    left_out = any("not read" in line and any(tower in line for tower in towers) for line in found.remarks)
    assert left_out
    assert found.spec.vision is None  # Gemma 3's for want of preprocessor_config.json
    run = run_ragged(tmp_path, prompts_of(VOCAB, SEED), CONTEXT, new_tokens=8)
    assert compare(run, model) <= TOLERANCE


def _as_before_transformers_5(config: dict[str, object]) -> dict[str, object]:
    """Rewrite ``rope_parameters`` and ``dtype`` to the keys that most files on the hub have."""
    old = dict(config)
    old["torch_dtype"] = old.pop("dtype")
    rope = old.pop("rope_parameters")
    assert isinstance(rope, dict)
    if "full_attention" in rope:  # Gemma 3
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    old["rope_theta"] = rope.pop("rope_theta")
    old["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
    old["rope_scaling"] = None if rope["rope_type"] == "default" else {**rope, "type": rope.pop("rope_type")}
    return old


def test_every_supported_architecture_has_a_case(tmp_path: Path) -> None:
    made = set()
    for case in CASES:
        make(case, tmp_path / case)
        made |= set(json.loads((tmp_path / case / "config.json").read_text())["architectures"])
    assert made == set(SUPPORTED)


@pytest.mark.parametrize("fault", ["window", "scale", "theta"])
def test_the_comparison_notices_small_faults(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that is one too long, a scale 1 % off, a base frequency 1 % off: each fails the comparison."""
    model = make("mistral", tmp_path)
    original = checkpoint.describe(tmp_path)

    def broken(spec: ModelSpec) -> ModelSpec:
        a = spec.layers[0].attention
        assert a.window is not None
        assert a.rope is not None
        a = {
            "window": replace(a, window=a.window + 1),
            "scale": replace(a, scale=a.scale * 1.01),
            "theta": replace(a, rope=replace(a.rope, theta=a.rope.theta * 1.01)),
        }[fault]
        return replace(spec, layers=tuple(replace(layer, attn=a) for layer in spec.layers))

    found = replace(original, spec=broken(original.spec))
    monkeypatch.setattr("tests.parity.harness.describe", lambda path: found)
    run = run_ragged(tmp_path, prompts_of(VOCAB, SEED), CONTEXT, new_tokens=8)
    with pytest.raises(AssertionError):  # a token differs, or the logits do
        assert compare(run, model) <= TOLERANCE
