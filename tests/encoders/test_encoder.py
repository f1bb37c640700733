"""A BERT in whole engines: as transformers computes it, and the same bits alone, in any batch and at any budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.encoders.tiny import save_bert, save_sentence_files, texts
from transformers import PreTrainedModel

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelLoadError, RequestError, UnsupportedModelError
from quire.kernels.registry import backends

pytestmark = pytest.mark.component

LEVELS = backends("linear")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("bert")
    model = save_bert(folder)
    save_sentence_files(folder)
    return folder, model


def vectors(llm: LLM, prompts: list[str]) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]


def expected(model: PreTrainedModel, llm: LLM, text: str) -> torch.Tensor:
    ids = torch.tensor([llm.get_tokenizer().encode(text)])
    with torch.no_grad():
        rows = model(ids).last_hidden_state[0]
    return torch.nn.functional.normalize(rows.mean(0), dim=0)


def test_vectors_are_those_of_transformers(bert: tuple[Path, PreTrainedModel]) -> None:
    folder, model = bert
    llm = LLM(str(folder), threads=1)
    prompts = texts(40)
    worst = max(
        (torch.tensor(ours) - expected(model, llm, text)).abs().max().item()
        for ours, text in zip(vectors(llm, prompts), prompts, strict=True)
    )
    assert worst <= 2e-6
    llm.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_text_alone_has_the_bits_it_has_in_a_batch(
    bert: tuple[Path, PreTrainedModel], level: str, dtype: str
) -> None:
    prompts = texts(24, seed=3)
    llm = LLM(str(bert[0]), threads=1, cpu_isa=level, dtype=dtype)
    together = vectors(llm, prompts)
    assert [vectors(llm, [text])[0] for text in prompts] == together
    assert vectors(llm, prompts[::-1])[::-1] == together
    llm.close()
    others = LLM(
        str(bert[0]), threads=2, cpu_isa=level, dtype=dtype, max_num_batched_tokens=70, max_num_seqs=3
    )
    assert vectors(others, prompts) == together
    others.close()


def test_a_text_longer_than_the_budget_runs_alone(bert: tuple[Path, PreTrainedModel]) -> None:
    llm = LLM(str(bert[0]), threads=1, max_num_batched_tokens=16)
    long = " ".join("cat" for _ in range(62))
    assert vectors(llm, ["a", long, "b"]) == [vectors(llm, [text])[0] for text in ("a", long, "b")]
    llm.close()


def test_what_an_encoder_does_not_do_is_refused_by_name(bert: tuple[Path, PreTrainedModel]) -> None:
    llm = LLM(str(bert[0]), threads=1)
    with pytest.raises(RequestError, match="is an encoder, which writes no text"):
        llm.generate(["cat"], SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(RequestError, match="trained with 'mean'"):
        llm.embed(["cat"], pooling="last", use_tqdm=False)
    with pytest.raises(RequestError, match="64"):
        llm.embed([" ".join("cat" for _ in range(63))], use_tqdm=False)
    llm.close()
    for setting in ({"speculative_config": {"method": "ngram"}}, {"max_loras": 1}, {"kv_dtype": "int8"}):
        with pytest.raises(ConfigError, match="an encoder, which has no cache"):
            LLM(str(bert[0]), **setting)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="80 positions"):
        LLM(str(bert[0]), max_model_len=81)


@pytest.mark.parametrize(
    "mode", ["cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
)
def test_pooling_is_what_the_files_say(tmp_path: Path, mode: str) -> None:
    model = save_bert(tmp_path)
    save_sentence_files(tmp_path, mode, normalize=False)
    llm = LLM(str(tmp_path), threads=1)
    ids = llm.get_tokenizer().encode("cat dog a b")
    with torch.no_grad():
        rows = model(torch.tensor([ids])).last_hidden_state[0]
    weights = torch.arange(1, len(ids) + 1)[:, None]
    wanted = {
        "cls_token": rows[0],
        "max_tokens": rows.amax(0),
        "mean_sqrt_len_tokens": rows.sum(0) / len(ids) ** 0.5,
        "weightedmean_tokens": (rows * weights).sum(0) / weights.sum(),
        "lasttoken": rows[-1],
    }[mode]
    assert torch.allclose(torch.tensor(vectors(llm, ["cat dog a b"])[0]), wanted, atol=2e-5)
    llm.close()


def test_a_default_prompt_is_put_before_texts(tmp_path: Path) -> None:
    save_bert(tmp_path)
    save_sentence_files(tmp_path, prompts={"query": "query: ", "document": ""}, default_prompt_name="query")
    with_prompt = LLM(str(tmp_path), threads=1)
    save_sentence_files(tmp_path)
    without = LLM(str(tmp_path), threads=1)
    assert vectors(with_prompt, ["cat"]) == vectors(without, ["query: cat"]) != vectors(without, ["cat"])
    with_prompt.close()
    without.close()


def test_files_that_say_more_than_is_run_are_refused(tmp_path: Path) -> None:
    save_bert(tmp_path)
    save_sentence_files(tmp_path, default_prompt_name="query")
    with pytest.raises(ModelLoadError, match="default_prompt_name"):
        LLM(str(tmp_path))
    save_sentence_files(tmp_path)
    modules = (tmp_path / "modules.json").read_text()
    (tmp_path / "modules.json").write_text(modules.replace("models.Normalize", "models.CNN"))
    with pytest.raises(UnsupportedModelError, match="'CNN' is not supported"):
        LLM(str(tmp_path))
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not readable JSON"):
        LLM(str(tmp_path))
    (tmp_path / "modules.json").write_text(modules)
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(
        pooling.read_text().replace('"pooling_mode_cls_token": false', '"pooling_mode_cls_token": true')
    )
    with pytest.raises(UnsupportedModelError, match="one way of pooling"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("level", LEVELS)
def test_linears_in_int8_are_exact_and_near(bert: tuple[Path, PreTrainedModel], level: str) -> None:
    prompts = texts(12, seed=5)
    plain = LLM(str(bert[0]), threads=1, cpu_isa=level)
    rounded = LLM(str(bert[0]), threads=1, cpu_isa=level, quantize="int8")
    near, exact = torch.tensor(vectors(rounded, prompts)), torch.tensor(vectors(plain, prompts))
    assert 0.99 < (near * exact).sum(1).min() < 1.0
    assert [vectors(rounded, [text])[0] for text in prompts] == near.tolist()
    plain.close()
    rounded.close()
