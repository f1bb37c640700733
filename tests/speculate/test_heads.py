"""Medusa, EAGLE and MTP: layouts, refusals, what they compute, and answers that equal those without."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.models import tiny
from tests.parity import families
from tests.speculate import heads
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.args import EngineArgs
from quire.cost.speculation import draft_bytes
from quire.device import detect_device
from quire.engine.assemble import configure, llm_args
from quire.errors import QuireError
from quire.models.hub import quill_path
from quire.sampling.draft_tree import Drafts
from quire.speculate.proposer import Wanted

HIDDEN, VOCAB, HEAD_DIM, LAYERS, TAPS = 32, 4096, 8, 6, (1, 2, 4)
PROMPTS = ["It was a dark and", "The cat sat on the mat. The cat sat on", "Once upon a time"]
EAGLE = {
    "eagle": lambda: heads.eagle(HIDDEN, VOCAB, HEAD_DIM),
    "eagle without bias": lambda: heads.eagle(HIDDEN, VOCAB, HEAD_DIM, bias=False),
    "eagle3": lambda: heads.eagle3(HIDDEN, VOCAB, HEAD_DIM, TAPS, VOCAB // 2),
}
MEDUSA = {
    "medusa": lambda: heads.medusa(HIDDEN, VOCAB),
    "medusa of vLLM": lambda: heads.medusa(HIDDEN, VOCAB, blocks=2, vllm=True, own=False),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of six layers with random weights of a size that makes its answers change, and Quill's tokenizer."""
    changes = {"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    folder = tmp_path_factory.mktemp("target")
    return with_tokenizer(tiny.write_model(folder, lively(tiny.CONFIG | changes), **changes))


def lively(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: 1 + 0.1 * weight if weight.ndim == 1 else weight * weight.shape[-1] ** -0.5
        for name, weight in tiny.tensors(config=config).items()
    }


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(quill_path("quill") / name, folder / name)
    return folder


def engine(target: Path | str, **settings: Any) -> LLM:
    defaults = {"kv_memory": "16MiB", "max_model_len": 128, "dtype": "float32"}
    return LLM(str(target), **(defaults | settings))


def proposals(llm: LLM, params: SamplingParams) -> list[tuple[list[int], tuple[int, ...]]]:
    """What is proposed behind which known tokens while one prompt is answered."""
    worker = llm.client.core.executor.worker
    real, seen = worker.drafting.proposer.propose, []

    def propose(wanted: list[Wanted]) -> list[Drafts]:
        found = real(wanted)
        seen.extend(
            (each.token_ids.tolist(), drafts.token_ids) for each, drafts in zip(wanted, found, strict=True)
        )
        return found

    worker.drafting.proposer.propose = propose
    llm.generate(PROMPTS[1:2], params)
    llm.close()
    return seen


@cache
def oracle(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


def hidden_states(target: Path, token_ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """By transformers: what enters each layer, and what leaves the last norm, ``[n, hidden]``."""
    model = oracle(target)
    with torch.no_grad():
        found = model.model(torch.tensor([token_ids]), output_hidden_states=True)
    return [each[0] for each in found.hidden_states], found.last_hidden_state[0]


@pytest.mark.parametrize("kind", EAGLE)
def test_eagle_drafts_are_those_of_its_equations(kind: str, target: Path, tmp_path: Path) -> None:
    config, stored = EAGLE[kind]()
    heads.write(tmp_path, config, stored)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    seen = proposals(
        engine(target, draft_model=str(tmp_path), spec_tokens=3, max_num_batched_tokens=16), params
    )
    assert len(seen) >= 5
    weights = load_file(target / "model.safetensors")
    table, wide = weights["model.embed_tokens.weight"], kind == "eagle3"
    for known, drafts in seen:
        inputs, last = hidden_states(target, known[:-1])
        hidden = (
            F.linear(torch.cat([inputs[tap] for tap in TAPS], dim=-1), stored["fc.weight"]) if wide else last
        )
        tokens, expected = known[1:], []
        for _ in drafts:
            rows = heads.eagle_rows(
                stored, table[tokens], hidden, HEAD_DIM, "midlayer." if wide else "layers.0."
            )
            out = heads.norm(rows[-1], stored["norm.weight"]) if wide else rows[-1]
            best = int((out @ (stored["lm_head.weight"] if wide else weights["lm_head.weight"]).T).argmax())
            expected.append(2 * best if wide else best)
            tokens, hidden = [*tokens, expected[-1]], torch.cat([hidden, rows[-1:]])
        assert list(drafts) == expected[: len(drafts)], len(known)


@pytest.mark.parametrize("kind", MEDUSA)
def test_medusa_drafts_are_those_of_its_equations(kind: str, target: Path, tmp_path: Path) -> None:
    config, stored = MEDUSA[kind]()
    heads.write(tmp_path, config, stored, "medusa_lm_head.safetensors")
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    seen = proposals(engine(target, speculate="medusa", draft_model=str(tmp_path), spec_tokens=3), params)
    assert len(seen) >= 5
    vllm = kind != "medusa"
    output = load_file(target / "model.safetensors")["lm_head.weight"]
    for known, drafts in seen:
        last = hidden_states(target, known[:-1])[1][-1]
        expected = []
        for head in range(3):
            x = last
            for block in range(2 if vllm else 1):
                name = f"blocks.{head}.layers.{block}" if vllm else f"{head}.{block}.linear"
                x = x + F.silu(F.linear(x, stored[f"{name}.weight"], stored.get(f"{name}.bias")))
            expected.append(int((x @ (output if vllm else stored[f"{head}.1.weight"]).T).argmax()))
        assert list(drafts) == expected[: len(drafts)], len(known)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """DeepSeek-V3 of two layers and, for multi-token prediction, a third one; in transformers it has three."""
    folder = tmp_path_factory.mktemp("deepseek")
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 3, "hidden_size": HIDDEN, "rope_parameters": None}
    model = families.make("deepseek_v3", folder, **sizes)
    stored = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        stored[f"model.layers.2.{name}.weight"] = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    stored["model.layers.2.eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) / 8
    stored["model.layers.2.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["model.layers.2.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    config = json.loads((folder / "config.json").read_text())
    heads.write(folder, config | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, stored)
    return with_tokenizer(folder), model


def test_mtp_drafts_are_those_of_its_equations(deepseek: tuple[Path, Any]) -> None:
    folder, model = deepseek
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    seen = proposals(engine(folder, speculate="mtp", spec_tokens=2, max_num_batched_tokens=16), params)
    assert len(seen) >= 5
    stored = load_file(folder / "model.safetensors")
    own = {
        name.removeprefix("model.layers.2."): weight
        for name, weight in stored.items()
        if ".layers.2." in name
    }
    eps = 1e-6
    for known, drafts in seen:
        with torch.no_grad():
            found = model.model(torch.tensor([known[:-1]]), output_hidden_states=True)
            hidden = heads.norm(found.hidden_states[2][0], stored["model.norm.weight"], eps)
            tokens, expected = known[1:], []
            for _ in drafts:
                embeddings = heads.norm(stored["model.embed_tokens.weight"][tokens], own["enorm.weight"], eps)
                both = torch.cat([embeddings, heads.norm(hidden, own["hnorm.weight"], eps)], dim=-1)
                x = F.linear(both, own["eh_proj.weight"])[None]
                n = x.shape[1]
                angles = model.model.rotary_emb(x, torch.arange(n)[None])
                mask = torch.full((1, 1, n, n), float("-inf")).triu(1)
                out = model.model.layers[2](x, attention_mask=mask, position_embeddings=angles)
                last = (out[0] if isinstance(out, tuple) else out)[0, -1]
                logits = heads.norm(last, own["shared_head.norm.weight"], eps) @ stored["lm_head.weight"].T
                expected.append(int(logits.argmax()))
                tokens, hidden = [*tokens, expected[-1]], torch.cat([hidden, last[None]])
        assert list(drafts) == expected, len(known)


def outputs(llm: LLM) -> tuple[list[object], int]:
    """Answers of several kinds, and how many drafts they accepted. Closes ``llm``."""
    params = [
        SamplingParams(temperature=0.0, seed=1, max_tokens=24),
        SamplingParams(temperature=0.9, seed=2, max_tokens=24, logprobs=1, frequency_penalty=0.4, n=2),
        SamplingParams(temperature=0.7, seed=3, max_tokens=24, top_p=0.9, stop=[" the"]),
    ]
    found = [
        [(o.token_ids, o.logprobs, o.text, o.finish_reason) for o in answer.outputs]
        for each in params
        for answer in llm.generate(PROMPTS, each)
    ]
    num_accepted = llm.client.core.stats().num_accepted_tokens
    llm.close()
    return found, num_accepted


@pytest.mark.parametrize("kind", [*EAGLE, *MEDUSA])
def test_random_heads_do_not_change_answers(kind: str, target: Path, tmp_path: Path) -> None:
    """In a cache that two sequences fill, so that they are preempted, and with prompts in chunks."""
    heads.write(tmp_path, *(EAGLE | MEDUSA)[kind]())
    small = {"num_kv_blocks": 10, "max_num_batched_tokens": 12, "max_model_len": 64}
    plain, _ = outputs(engine(target, **small))
    drafting = engine(target, **small, draft_model=str(tmp_path), spec_tokens=3)
    core = drafting.client.core
    found, _ = outputs(drafting)
    assert found == plain
    assert core.stats().num_draft_tokens > 100
    assert core.stats().num_preemptions > 0


def test_mtp_does_not_change_answers(deepseek: tuple[Path, Any]) -> None:
    folder, _ = deepseek
    plain, _ = outputs(engine(folder))
    assert outputs(engine(folder, speculate="mtp", spec_tokens=2))[0] == plain


def broken(kind: str, change: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config, stored = (EAGLE | MEDUSA)[kind]()
    if change == "hidden":
        config["hidden_size"] = 48
    elif change == "vocabulary":
        config["vocab_size"] = 5000
    elif change == "missing":
        del stored[min(name for name in stored if "mlp.up" in name or ".linear.weight" in name)]
    elif change == "shape":
        stored["fc.weight"] = stored["fc.weight"][:, 1:]
    elif change == "unknown":
        stored["layers.3.weight"] = torch.zeros(3)
    elif change == "layers":
        config["num_hidden_layers"] = 2
    elif change == "taps":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}
    elif change == "ids":
        stored["d2t"][5] = VOCAB
    return config, stored


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("eagle", "hidden", "hidden_size = 48, and the model has 32: these heads belong to another model"),
        ("eagle3", "vocabulary", "vocab_size = 5000, and the model has 4096"),
        ("eagle", "missing", "1 weights are missing, for example layers.0.mlp.up_proj.weight"),
        ("eagle", "shape", "fc.weight has shape .32, 63., and the configuration asks for .32, 64."),
        ("eagle3", "unknown", "layers.3.weight"),
        ("eagle", "layers", "num_hidden_layers = 2 is not supported"),
        ("eagle3", "taps", "must be three layers of the model, which has layers 0…5"),
        ("eagle3", "ids", "d2t must name every id once, in 0…4095; row 5 gives 4101"),
        ("medusa", "missing", "1 weights are missing, for example 0.0.linear.weight"),
    ],
)
def test_wrong_heads_are_refused(kind: str, change: str, message: str, target: Path, tmp_path: Path) -> None:
    heads.write(tmp_path, *broken(kind, change))
    method = "medusa" if kind == "medusa" else "eagle"
    with pytest.raises(QuireError, match=message):
        engine(target, speculate=method, draft_model=str(tmp_path))


def test_pickled_heads_are_refused_with_how_to_convert_them(target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"0.0.linear.weight": torch.zeros(2, 2)}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(
        QuireError, match=r"medusa_lm_head.pt is a pickle.*convert it once: python -c .*save_file"
    ):
        engine(target, draft_model=str(tmp_path))


def test_settings_of_heads_that_contradict_are_refused(target: Path, tmp_path: Path) -> None:
    args = EngineArgs(model=str(target), max_model_len=128)
    heads.write(tmp_path / "medusa", *MEDUSA["medusa"]())
    for settings, message in (
        (
            {"speculate": "eagle"},
            "speculate = 'eagle' needs draft_model, the folder of its heads: there is none at",
        ),
        (
            {"speculate": "eagle", "draft_model": str(tmp_path / "medusa")},
            "has medusa heads, and speculate = 'eagle'",
        ),
        (
            {"speculate": "mtp"},
            "'mtp' needs a layer for multi-token prediction, which is read of DeepSeek-V3",
        ),
        ({"speculate": "mtp", "draft_model": "quill-draft"}, "has no use with speculate = 'mtp'"),
    ):
        with pytest.raises(QuireError, match=message):
            configure(replace(args, **settings), detect_device())


def test_the_memory_plan_counts_heads_and_what_they_keep(target: Path, tmp_path: Path) -> None:
    args = EngineArgs(model=str(target), max_model_len=64, kv_memory="1MiB", dtype="float32")
    plain, _ = configure(args, detect_device())
    heads.write(tmp_path, *EAGLE["eagle"]())
    config, _ = configure(replace(args, draft_model=str(tmp_path)), detect_device())
    assert config.speculate is not None
    weights, of_block = draft_bytes(config.speculate.heads, 16)
    assert weights == 4 * (2 * 32 * 32 + 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 40 * 32 + 32), "no embedding"
    assert of_block == 4 * 16 * (2 * 2 * HEAD_DIM + HIDDEN), (
        "K and V of one layer, and a hidden state per token"
    )
    block = plain.kv_layout.block_bytes(16, "float32")
    assert config.cache.num_blocks == (1 << 20) // (block + of_block) < plain.cache.num_blocks


@pytest.mark.parametrize(
    ("method", "ours"),
    [
        ("eagle", "eagle"),
        ("eagle3", "eagle"),
        ("medusa", "medusa"),
        ("mtp", "mtp"),
        ("deepseek_mtp", "mtp"),
        ("qwen3_5_mtp", "mtp"),
    ],
)
def test_the_methods_of_vllm_are_understood(method: str, ours: str) -> None:
    given = {"method": method, "model": "somewhere", "num_speculative_tokens": 3}
    expected = EngineArgs(model="quill", speculate=ours, spec_tokens=3, long_prefill_token_threshold=0)
    if ours != "mtp":  # there the model is the target itself
        expected = replace(expected, draft_model="somewhere")
    assert llm_args("quill", {"speculative_config": given}) == expected


@pytest.mark.parametrize(
    ("method", "tree", "share"), [("eagle", 1, 0.35), ("eagle", 3, 0.2), ("medusa", 1, 0.1)], ids=str
)
def test_the_heads_that_ship_with_quill_are_accepted(method: str, tree: int, share: float) -> None:
    """``share``: of the drafts that are right at least; on held prose, more than half of EAGLE's first ones are."""
    settings = {"dtype": "auto", "max_num_batched_tokens": 32}
    plain, _ = outputs(engine("quill", **settings))
    llm = engine("quill", **settings, speculate=method, spec_tokens=2 if tree == 1 else 4, spec_tree=tree)
    core = llm.client.core
    found, num_accepted = outputs(llm)
    assert found == plain
    assert num_accepted > share * core.stats().num_draft_tokens


def test_accepted_drafts_are_computed_again() -> None:
    llm = engine("quill", dtype="auto", speculate="eagle", spec_tokens=3)
    core = llm.client.core
    proposer, model = core.executor.worker.drafting.proposer, core.executor.worker.drafting.model
    real, compared = proposer.propose, 0

    def propose(wanted: list[Wanted]) -> list[Any]:
        nonlocal compared
        found = real(wanted)
        model.filled[:] = model.written[:] = 0  # as if nothing had been computed
        assert real(wanted) == found
        compared += len(found)
        return found

    proposer.propose = propose
    llm.generate(PROMPTS[:1], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    num_accepted = core.stats().num_accepted_tokens
    llm.close()
    assert compared > 10
    assert num_accepted > 5
