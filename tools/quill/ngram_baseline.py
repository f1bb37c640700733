"""The baseline: an interpolated modified Kneser-Ney 5-gram model over the same BPE tokens, in bits per byte.

Chen & Goodman 1999 ("An empirical study of smoothing techniques for language modeling"), with the three discounts of
each order estimated from its own counts of counts, no pruning. The unit is Quill's BPE token: both models predict the
same sequence and nats per token turn into bits per byte by the same factor. The unigram level interpolates with a
uniform distribution over the 4,071 ordinary tokens (the special ones never occur in text, which favours the baseline).
Every novel is opened by four ``<|bos|>``, which is no target.

An n-gram is one uint64, 12 bits a token, the predicted token in the low bits. Numpy, one thread, about 2 GB.

    order 5:  counts of the training text
    order n:  in how many (n+1)-gram types is this n-gram the suffix

Usage: ``nice -n 19 python tools/quill/ngram_baseline.py --data /tmp/quill``
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from make_data import BOS_ID, documents

BITS = 12
NUM_ORDINARY_TOKENS = 4096 - 25


def ngrams(texts: list[np.ndarray], order: int) -> np.ndarray:
    """The packed n-gram that ends at each token of the texts, [num_tokens] uint64."""
    rows = []
    for text in texts:
        padded = np.concatenate([np.full(order - 1, BOS_ID, dtype=np.uint64), text.astype(np.uint64)])
        keys = np.zeros(text.size, dtype=np.uint64)
        for offset in range(order):
            keys = (keys << np.uint64(BITS)) | padded[offset : offset + text.size]
        rows.append(keys)
    return np.concatenate(rows)


def suffixes(keys: np.ndarray, order: int) -> np.ndarray:
    """Packed n-grams without their first token."""
    return keys & np.uint64((1 << (BITS * (order - 1))) - 1)


def find(table: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index, present) of each key in a sorted table."""
    index = np.minimum(np.searchsorted(table, keys), table.size - 1)
    return index, table[index] == keys


@dataclass(frozen=True, slots=True)
class Order:
    """One level: n-gram types with their discounted counts, contexts with their totals and back-off mass."""

    keys: np.ndarray  # [types] uint64, sorted
    discounted: np.ndarray  # [types] float32
    contexts: np.ndarray  # [contexts] uint64, sorted
    totals: np.ndarray  # [contexts] float64
    mass: np.ndarray  # [contexts] float64, share of the probability that goes to the lower order

    def probability(self, keys: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Interpolated probability of each packed n-gram, given that of the order below. [num_tokens] float64."""
        at, seen = find(self.contexts, keys >> np.uint64(BITS))
        index, present = find(self.keys, keys)
        own = np.where(present, self.discounted[index], 0.0) / self.totals[at]
        return np.where(seen, own + self.mass[at] * lower, lower)


def discounts(counts: np.ndarray) -> np.ndarray:
    """D1, D2, D3+ of modified Kneser-Ney, as [0, D1, D2, D3]."""
    n1, n2, n3, n4 = (float(np.count_nonzero(counts == n)) for n in (1, 2, 3, 4))
    ratio = n1 / (n1 + 2 * n2)
    return np.array([0.0, 1 - 2 * ratio * n2 / n1, 2 - 3 * ratio * n3 / n2, 3 - 4 * ratio * n4 / n3])


def make_order(keys: np.ndarray, counts: np.ndarray) -> Order:
    """keys: sorted n-gram types, counts: their (adjusted) counts."""
    discount = discounts(counts)[np.minimum(counts, 3)]
    contexts, starts = np.unique(keys >> np.uint64(BITS), return_index=True)
    totals = np.add.reduceat(counts.astype(np.float64), starts)
    mass = np.add.reduceat(discount, starts) / totals
    return Order(keys, (counts - discount).astype(np.float32), contexts, totals, mass)


def estimate(texts: list[np.ndarray], highest: int) -> list[Order]:
    """Orders 1..highest, lowest first."""
    keys, counts = np.unique(ngrams(texts, highest), return_counts=True)
    levels = [make_order(keys, counts)]
    for order in range(highest, 1, -1):
        keys, counts = np.unique(suffixes(keys, order), return_counts=True)
        levels.append(make_order(keys, counts))
    return levels[::-1]


def probabilities(levels: list[Order], texts: list[np.ndarray]) -> np.ndarray:
    """Probability of every token of the texts, [num_tokens] float64."""
    highest = len(levels)
    keys = ngrams(texts, highest)
    result = np.full(keys.size, 1.0 / NUM_ORDINARY_TOKENS)
    for order, level in enumerate(levels, start=1):
        result = level.probability(keys & np.uint64((1 << (BITS * order)) - 1), result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--orders", type=int, nargs="+", default=[5])
    args = parser.parse_args()
    train, valid = (documents(np.load(args.data / f"{name}.npy")) for name in ("text", "valid"))
    num_bytes = json.loads((args.data / "data.json").read_text())["valid_bytes"]
    for order in args.orders:
        levels = estimate(train, order)
        bits = -np.log2(probabilities(levels, valid)).sum()
        num_tokens = sum(text.size for text in valid)
        print(
            f"{order}-gram, {sum(level.keys.size for level in levels)} n-gram types, {num_tokens} tokens:",
            end=" ",
        )
        print(
            f"{bits * math.log(2) / num_tokens:.4f} nats per token, {bits / num_bytes:.4f} bits per byte",
            flush=True,
        )


if __name__ == "__main__":
    main()
