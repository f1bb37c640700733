"""`LLM(lora=…)`: adapters by name, loaded later, rejected by field."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lora.peft_files import make_adapters

from quire import LLM, SamplingParams
from quire.errors import NotFoundError, QuireError, RequestError
from quire.models.checkpoint import describe
from quire.models.hub import quill_path


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
