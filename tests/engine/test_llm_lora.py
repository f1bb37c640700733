"""`LLM(lora=…)`: adapters by name, loaded later, rejected by field."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from tests.lora.peft_files import PREFIX, end_tensors, make_adapters, make_end_adapters, write_adapter

from quire import LLM, SamplingParams
from quire.errors import NotFoundError, QuireError, RequestError
from quire.models.checkpoint import describe
from quire.models.hub import quill_path
from quire.request import Adapter


def test_adapters_by_name(tmp_path: Path) -> None:
    model = str(quill_path("quill"))
    one, two, three = make_adapters(tmp_path, describe(Path(model)).spec)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(model, lora={"one": one.path}, max_loras=1, max_lora_rank=8, num_kv_blocks=64, threads=1) as llm:
        prompts = ["Once upon a time"] * 2
        base, adapted = llm.generate(prompts, greedy, False, adapter=[None, "one"])
        assert base.outputs[0].text != adapted.outputs[0].text
        (alone,) = llm.generate(prompts[:1], greedy, False, adapter="one")
        assert alone.outputs[0].token_ids == adapted.outputs[0].token_ids
        llm.adapters.load("two", two.path)
        both = llm.generate(prompts, greedy, False, adapter=["one", "two"])  # one slot: one after the other
        assert both[0].outputs[0].token_ids == alone.outputs[0].token_ids
        assert (
            "".join(c.text for c in llm.stream(prompts[0], greedy, adapter="two")) == both[1].outputs[0].text
        )
        with pytest.raises(RequestError, match="rank 17, and a slot of this engine holds 8"):
            llm.adapters.load("three", three.path)
        with pytest.raises(RequestError, match="1 entries for 2 prompts"):
            llm.generate(prompts, greedy, False, adapter=["one"])
        llm.adapters.remove("two")
        with pytest.raises(NotFoundError, match=r"no adapter 'two' here\. Loaded: 'one'"):
            llm.generate(prompts, greedy, False, adapter="two")


def merged_quill(adapter: Adapter, folder: Path) -> Path:
    """Quill, untied, with the weights of ``adapter`` in its own."""
    with safe_open(quill_path("quill") / "model.safetensors", "pt") as file:
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    with safe_open(Path(adapter.path) / "adapter_model.safetensors", "pt") as file:
        stored = {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    scale = json.loads((Path(adapter.path) / "adapter_config.json").read_text())["lora_alpha"] / adapter.rank
    for name, tensor in stored.items():
        module, _, kind = name.partition(".lora_")
        weight = weights[f"{module.removesuffix('.weight')}.weight"]
        if not kind:
            weight.copy_(tensor)
        elif kind.startswith(("A", "embedding_A")):
            delta = scale * stored[name.replace("_A", "_B")] @ tensor
            weight += delta.T if kind.startswith("embedding") else delta
            magnitude = stored.get(f"{module}.lora_magnitude_vector")
            if magnitude is not None:
                weight *= (magnitude / weight.norm(dim=1)).unsqueeze(1)
    shutil.copytree(quill_path("quill"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "tie_word_embeddings": False, "dtype": "float32"})
    )
    save_file(weights, folder / "model.safetensors")
    return folder


def test_adapted_answers_are_those_of_the_merged_model(tmp_path: Path) -> None:
    """LoRA of both ends, whole ends, and a DoRA on Quill, whose ends are tied: tokens and the prompt's logprobs."""
    model = str(quill_path("quill"))
    adapters = make_end_adapters(tmp_path, describe(Path(model)).spec)
    settings: dict[str, Any] = {"num_kv_blocks": 64, "threads": 1, "dtype": "float32"}
    sampling = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0, ignore_eos=True)
    prompts = ["Once upon a time there was"]
    with LLM(model, lora={each.name: each.path for each in adapters}, **settings) as llm:
        together = llm.generate(prompts * 3, sampling, False, adapter=[each.name for each in adapters])
        scored = [llm.generate(prompts, sampling, False, adapter=each.name)[0] for each in adapters]
    for adapter, answer, again in zip(adapters, together, scored, strict=True):
        with LLM(str(merged_quill(adapter, tmp_path / f"merged-{adapter.name}")), **settings) as llm:
            (expected,) = llm.generate(prompts, sampling, False)
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids
        assert answer.prompt_logprobs == again.prompt_logprobs
        assert answer.prompt_logprobs is not None
        assert expected.prompt_logprobs is not None
        for ours, theirs in zip(answer.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert ours is not None
            assert theirs is not None
            assert {token: each.logprob for token, each in ours.items()} == pytest.approx(
                {token: each.logprob for token, each in theirs.items()}, abs=2e-3
            )


def test_whole_modules_need_room(tmp_path: Path) -> None:
    """Slots have room for what --lora brings, and for what the setting names."""
    model = str(quill_path("quill"))
    low, whole, _ = make_end_adapters(tmp_path, describe(Path(model)).spec)
    settings: dict[str, Any] = {"num_kv_blocks": 64, "threads": 1}
    with (
        LLM(model, lora={"low": low.path}, max_loras=2, **settings) as llm,
        pytest.raises(RequestError, match=r"brings embed_tokens and lm_head whole .*--lora-modules-to-save"),
    ):
        llm.adapters.load("whole", whole.path)
    with pytest.raises(QuireError, match="lora_modules_to_save = 'norm' must be embed_tokens or lm_head"):
        LLM(model, max_loras=1, lora_modules_to_save=("norm",), **settings)
    with LLM(model, max_loras=1, lora_modules_to_save=("embed_tokens", "lm_head"), **settings) as llm:
        llm.adapters.load("whole", whole.path)
        (answer,) = llm.generate(["A"], SamplingParams(max_tokens=2, ignore_eos=True), False, adapter="whole")
        assert answer.outputs[0].finish_reason == "length"


def test_a_copy_of_another_model_is_rejected(tmp_path: Path) -> None:
    """PEFT saves the model's own matrix beside LoRA of it; another one says that the adapter is another model's."""
    model = str(quill_path("quill"))
    spec = describe(Path(model)).spec
    with safe_open(quill_path("quill") / "model.safetensors", "pt") as file:
        own = file.get_tensor("model.embed_tokens.weight")
    for copy, fits in ((own, True), (own * 2, False)):
        name = f"{PREFIX}lm_head.base_layer.weight"
        stored = end_tensors(spec.vocab_size, spec.hidden_size, 4, "lm_head") | {name: copy}
        path = write_adapter(tmp_path / str(fits), stored, target_modules=["lm_head"])
        if fits:
            LLM(model, lora={"a": str(path)}, num_kv_blocks=64, threads=1).close()
        else:
            with pytest.raises(QuireError, match="its copy of lm_head differs from that of"):
                LLM(model, lora={"a": str(path)}, num_kv_blocks=64, threads=1)


def test_a_file_that_changed_fails_its_requests_alone(tmp_path: Path) -> None:
    model = str(quill_path("quill"))
    one, *_ = make_adapters(tmp_path, describe(Path(model)).spec)
    config = Path(one.path) / "adapter_config.json"
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(model, lora={"one": one.path}, num_kv_blocks=64, threads=1) as llm:
        text = config.read_text()
        config.write_text(text.replace('"lora_alpha": 8', '"lora_alpha": 9'))
        base, adapted = llm.generate(["A", "A"], greedy, False, adapter=[None, "one"])
        assert base.outputs[0].finish_reason == "length"
        assert adapted.outputs[0].finish_reason == "error"
        config.write_text(text)  # it is back: the next request finds it
        (again,) = llm.generate(["A"], greedy, False, adapter="one")
        assert again.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lora": ["one"]}, "must be name=path"),
        ({"lora": {"quill": "."}}, "adapter_config"),
        ({"lora": "one=."}, "must be a list"),
        ({"max_loras": -1}, "max_loras"),
    ],
)
def test_wrong_settings(settings: dict[str, object], text: str) -> None:
    with pytest.raises(QuireError, match=text):
        LLM("quill", **settings)
