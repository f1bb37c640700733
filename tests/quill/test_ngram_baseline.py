"""The Kneser-Ney baseline that Quill is compared with: a true distribution, and right on a case counted by hand."""

from __future__ import annotations

import ngram_baseline
import numpy as np
import pytest


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_of_all_next_tokens_sum_to_one(order: int) -> None:
    rng = np.random.default_rng(7)
    texts = [rng.geometric(0.2, size=n).clip(max=60).astype(np.uint16) + 24 for n in (3000, 500)]
    levels = ngram_baseline.estimate(texts, order)
    contexts = [texts[0][100 : 100 + order - 1], np.full(order - 1, 4000, dtype=np.uint16)]
    for context in contexts:
        continuations = [np.append(context, np.uint16(token)) for token in range(25, 4096)]
        last = [ngram_baseline.probabilities(levels, [text])[-1] for text in continuations]
        # The text of the continuation starts a document, so its context is padded with <|bos|>: still one context.
        assert sum(last) == pytest.approx(1.0, abs=1e-6)


def test_lower_order_counts_distinct_predecessors() -> None:
    a, b, c = 30, 31, 32
    text = np.array([a, b, a, b, c, b], dtype=np.uint16)
    keys = np.unique(ngram_baseline.ngrams([text], 2))
    kept, counts = np.unique(ngram_baseline.suffixes(keys, 2), return_counts=True)
    # a follows <|bos|> and b; b follows a and c; c follows b.
    assert dict(zip(kept.tolist(), counts.tolist(), strict=True)) == {a: 2, b: 2, c: 1}
