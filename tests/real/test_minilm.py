"""all-MiniLM-L6-v2 and all-mpnet-base-v2, encoders that people use: near what transformers computes, and exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from quire import LLM

pytestmark = [pytest.mark.real, pytest.mark.component]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scope.md"


@pytest.fixture(scope="module")
def llm(minilm: Path) -> Iterator[LLM]:
    made = LLM(str(minilm), threads=1)
    yield made
    made.close()


def embed(llm: LLM, texts: list[str]) -> torch.Tensor:
    return torch.tensor([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])


def test_vectors_are_those_of_transformers(llm: LLM, minilm: Path) -> None:
    texts = [line for line in PAGE.read_text().splitlines() if line.strip()]
    ours, model = embed(llm, texts), AutoModel.from_pretrained(minilm).eval()
    for vector, text in zip(ours, texts, strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([llm.get_tokenizer().encode(text)])).last_hidden_state[0]
        assert torch.cosine_similarity(vector, rows.mean(0), dim=0) >= 0.9999
    alone = torch.cat([embed(llm, [text]) for text in texts])
    assert torch.equal(alone, ours)


def test_linears_in_int8_are_near(llm: LLM, minilm: Path) -> None:
    texts = [line for line in PAGE.read_text().splitlines() if line.strip()][:24]
    rounded = LLM(str(minilm), threads=1, quantize="int8", dtype="bfloat16")
    assert (embed(rounded, texts) * embed(llm, texts)).sum(1).min() >= 0.999
    rounded.close()


def test_near_texts_have_near_vectors(llm: LLM) -> None:
    cat, kitten, stock = embed(
        llm, ["A cat sleeps.", "A kitten is asleep.", "Shares of banks fell on Monday."]
    )
    assert cat @ kitten > 0.6 > 0.2 > cat @ stock


def test_vectors_of_mpnet_are_those_of_transformers(mpnet: Path) -> None:
    texts = [line for line in PAGE.read_text().splitlines() if line.strip()][:16]
    llm, model = LLM(str(mpnet), threads=1), AutoModel.from_pretrained(mpnet).eval()
    ours = embed(llm, texts)
    for vector, text in zip(ours, texts, strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([llm.get_tokenizer().encode(text)])).last_hidden_state[0]
        assert torch.cosine_similarity(vector, rows.mean(0), dim=0) >= 0.9999
    assert torch.equal(torch.cat([embed(llm, [text]) for text in texts]), ours)
    llm.close()
