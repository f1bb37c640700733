"""The MTP layer of Qwen3.5 and Qwen3-Next, which transformers drops: its equations written again, and what it drafts.

A layer that attends, of transformers, with weights of its own, between two norms and a projection:

    x = fc [norm(embedding of token i + 1) | norm(hidden state of token i)]     hidden = norm(layer(x))

The hidden states are those behind the last norm, the model's for known tokens and the layer's own for drafts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.parity import families
from tests.speculate import heads
from tests.speculate.test_heads import engine, outputs, proposals, with_tokenizer

from quire import SamplingParams
from quire.args import EngineArgs
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.errors import QuireError

VOCAB, ATTENDS = 4096, 1
CASES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def write_mtp(case: str, folder: Path, *, config: dict[str, Any] | None = None) -> Any:
    """Write a tiny model of ``case`` with an MTP layer, and return it with that layer, as transformers has both."""
    model = families.make(case, folder, vocab_size=VOCAB)
    layer = type(model.model.layers[ATTENDS])(model.config, ATTENDS).eval()
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in layer.parameters():
            scale = 0.1 if weight.ndim == 1 else weight.shape[-1] ** -0.5
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    own = {f"layers.0.{name}": weight.detach().clone() for name, weight in layer.state_dict().items()}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        own[f"{name}.weight"] = 0.3 * torch.randn(hidden, generator=generator)
    own["fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * hidden**-0.5
    stored = load_file(folder / "model.safetensors") | {f"mtp.{n}": weight for n, weight in own.items()}
    count = {} if case == "qwen3_next" else {"mtp_num_hidden_layers": 1}
    written = json.loads((folder / "config.json").read_text()) | count | (config or {})
    heads.write(folder, written, stored)
    with_tokenizer(folder)
    return model, layer, own, stored


def around_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return heads.norm(x, 1 + weight, 1e-6)


@pytest.mark.parametrize("case", CASES)
def test_drafts_of_qwens_mtp_are_those_of_its_equations(case: str, tmp_path: Path) -> None:
    model, layer, own, stored = write_mtp(case, tmp_path)
    assert model.config.rms_norm_eps == 1e-6
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    seen = proposals(engine(tmp_path, speculate="mtp", spec_tokens=3, max_num_batched_tokens=16), params)
    assert len(seen) >= 5
    table = stored["model.embed_tokens.weight"]
    output = table if model.config.tie_word_embeddings else stored["lm_head.weight"]
    for known, drafts in seen:
        with torch.no_grad():
            hidden = model.model(torch.tensor([known[:-1]]))[0][0]
            tokens, expected = known[1:], []
            for _ in drafts:
                both = (
                    around_one(table[tokens], own["pre_fc_norm_embedding.weight"]),
                    around_one(hidden, own["pre_fc_norm_hidden.weight"]),
                )
                x = F.linear(torch.cat(both, dim=-1), own["fc.weight"])[None]
                n = x.shape[1]
                angles = model.model.rotary_emb(x, torch.arange(n)[None])
                mask = torch.full((1, 1, n, n), float("-inf")).triu(1)
                out = layer(x, attention_mask=mask, position_embeddings=angles)
                last = around_one((out[0] if isinstance(out, tuple) else out)[0, -1], own["norm.weight"])
                expected.append(int((last @ output.T).argmax()))
                tokens, hidden = [*tokens, expected[-1]], torch.cat([hidden, last[None]])
        assert list(drafts) == expected, len(known)


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe"])
def test_qwens_mtp_does_not_change_answers(case: str, tmp_path: Path) -> None:
    """Prompts in chunks, in a cache that two sequences fill, so that they are preempted and go back to checkpoints."""
    write_mtp(case, tmp_path)
    small = {"num_kv_blocks": 10, "max_num_batched_tokens": 12, "max_model_len": 64}
    plain, _ = outputs(engine(tmp_path, **small))
    drafting = engine(tmp_path, **small, speculate="mtp", spec_tokens=3)
    core = drafting.client.core
    assert outputs(drafting)[0] == plain
    assert core.stats().num_draft_tokens > 100
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_heads_over_recurrent_layers_do_not_change_answers(method: str, tmp_path: Path) -> None:
    model, *_ = write_mtp("qwen3_5", tmp_path / "model")
    hidden = model.config.hidden_size
    made = heads.eagle(hidden, VOCAB, 8) if method == "eagle" else heads.medusa(hidden, VOCAB)
    heads.write(tmp_path / "heads", *made)
    small = {"num_kv_blocks": 10, "max_num_batched_tokens": 12, "max_model_len": 64}
    plain, _ = outputs(engine(tmp_path / "model", **small))
    drafting = engine(
        tmp_path / "model", **small, speculate=method, draft_model=str(tmp_path / "heads"), spec_tokens=3
    )
    core = drafting.client.core
    assert outputs(drafting)[0] == plain
    assert core.stats().num_draft_tokens > 100


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("qwen3_5", {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers says that this checkpoint has none"),
        ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True"),
        ("qwen3_next", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers says"),
    ],
)
def test_checkpoints_without_mtp_are_refused_by_key(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_mtp(case, tmp_path, config=changes)
    args = EngineArgs(model=str(tmp_path), max_model_len=128, speculate="mtp")
    with pytest.raises(QuireError, match=message):
        configure(args, detect_device())


def test_missing_tensor_of_mtp_is_named(tmp_path: Path) -> None:
    _, _, _, stored = write_mtp("qwen3_5", tmp_path)
    del stored["mtp.fc.weight"]
    heads.write(tmp_path, json.loads((tmp_path / "config.json").read_text()), stored)
    args = EngineArgs(model=str(tmp_path), max_model_len=128, speculate="mtp")
    with pytest.raises(QuireError, match=r"for example mtp\.fc\.weight"):
        configure(args, detect_device())


def test_text_config_of_seeing_models_has_mtp(tmp_path: Path) -> None:
    write_mtp("qwen3_5", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    args = EngineArgs(model=str(tmp_path), max_model_len=128, speculate="mtp")
    resolved, _ = configure(args, detect_device())
    assert resolved.speculate is not None
    assert resolved.speculate.heads is not None
    assert resolved.speculate.heads.spec.feeds_norm
