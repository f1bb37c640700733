"""Tokenize the novels into the token files that training reads.

Writes, under ``--out``: ``text.npy`` (the training novels), ``chat.npy`` (conversations), ``valid.npy`` (the validation
novels), all uint16 with ``<|bos|>`` before every document, and ``data.json`` with counts.
Reproducible: the one random choice (which paragraphs become conversations) is seeded.

Usage: ``python tools/quill/make_data.py --tokenizer /tmp/quill/tokenizer.json --out /tmp/quill``
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import numpy as np
from chat_data import chat_conversations
from make_tokenizer import TRAIN_TEXT, read_documents
from tokenizers import Tokenizer

BOS_ID = 0
VALID_TEXT = TRAIN_TEXT.with_name("novels_valid.txt.gz")


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one uint16 array; the tokenizer's own template puts ``<|bos|>`` before each."""
    encodings = tokenizer.encode_batch_fast(texts)
    return np.concatenate([np.asarray(e.ids, dtype=np.uint16) for e in encodings])


def documents(tokens: np.ndarray) -> list[np.ndarray]:
    """The token ids of each document, without the ``<|bos|>`` that opens it."""
    starts = np.flatnonzero(tokens == BOS_ID)
    return [tokens[a + 1 : b] for a, b in zip(starts, [*starts[1:], tokens.size], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    train, valid = read_documents(TRAIN_TEXT), read_documents(VALID_TEXT)
    rng = random.Random(args.seed)
    conversations = [c for document in train for c in chat_conversations(document, rng)]
    rng.shuffle(conversations)
    report = {
        "train_bytes": sum(len(d.encode()) for d in train),
        "valid_bytes": sum(len(d.encode()) for d in valid),
    }
    report |= {
        "train_documents": len(train),
        "valid_documents": len(valid),
        "conversations": len(conversations),
    }
    for name, texts in (("text", train), ("chat", conversations), ("valid", valid)):
        ids = encode(tokenizer, texts)
        np.save(args.out / f"{name}.npy", ids)
        report[f"{name}_tokens"] = int(ids.size)
    (args.out / "data.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    print("\n".join(conversations[:6]))


if __name__ == "__main__":
    main()
