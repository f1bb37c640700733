"""A SPLADE with real weights: its sparse vectors are those of transformers, and the same alone and among others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM

from quire import LLM

pytestmark = [pytest.mark.real, pytest.mark.component]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scope.md"


def test_weights_are_those_of_transformers(splade: Path) -> None:
    texts = [line for line in PAGE.read_text().splitlines() if line.strip()][:16]
    llm, model = LLM(str(splade), threads=1), AutoModelForMaskedLM.from_pretrained(splade).eval()
    found = llm.embed_sparse(texts, use_tqdm=False)
    for text, weights in zip(texts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([llm.get_tokenizer().encode(text)])).logits[0]
        wanted = torch.log1p(torch.relu(logits)).amax(0)
        ours = torch.zeros_like(wanted)
        ours[list(weights)] = torch.tensor(list(weights.values()))
        assert (ours - wanted).abs().max() <= 1e-5
        assert llm.embed_sparse(text, use_tqdm=False) == [weights]
    llm.close()


def test_near_texts_share_tokens(splade: Path) -> None:
    llm = LLM(str(splade), threads=1)
    cat, kitten, stock = llm.embed_sparse(
        ["a cat sleeps on a mat", "a kitten is asleep on the carpet", "shares of banks fell on monday"],
        use_tqdm=False,
    )

    def near(a: dict[int, float], b: dict[int, float]) -> float:
        return sum(weight * b.get(token_id, 0.0) for token_id, weight in a.items())

    assert near(cat, kitten) > 2 * near(cat, stock)
    llm.close()
