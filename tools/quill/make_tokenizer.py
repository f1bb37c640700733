"""Train Quill's tokenizer: byte-level BPE of 4,096 entries on the training novels.

The pre-tokenizer is GPT-2's (``ByteLevel`` with its regular expression), so every loader that reads a GPT-2 style
``tokenizer.json`` reads this one. The 25 special entries take ids 0..24. The ``<think>`` and ``<tool_call>`` pairs are
added tokens that are *not* "special", as in Qwen3, so that a reasoning or tool parser still sees them after
``skip_special_tokens``. BPE training is deterministic: the same text gives the same file.

Usage: ``python tools/quill/make_tokenizer.py --out /tmp/quill/tokenizer.json``
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
DOCUMENT_END = "<|endoftext|>"
CONTROL_TOKENS = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
VISIBLE_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
RESERVED_TOKENS = tuple(f"<|reserved_{i}|>" for i in range(16))
TRAIN_TEXT = Path(__file__).parents[3] / "shared/data/text/novels_train.txt.gz"


def read_documents(path: Path) -> list[str]:
    """The novels of a ``.txt.gz`` file whose documents are separated by a line ``<|endoftext|>``."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        parts = file.read().split(f"\n{DOCUMENT_END}\n")
    return [part.strip("\n") + "\n" for part in parts if part.strip()]


def train_tokenizer(documents: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS]
    specials += [AddedToken(t, special=False, normalized=False) for t in VISIBLE_TOKENS]
    specials += [AddedToken(t, special=True, normalized=False) for t in RESERVED_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    bos = CONTROL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=TRAIN_TEXT)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    documents = read_documents(args.text)
    tokenizer = train_tokenizer(documents)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out), pretty=False)
    sample = documents[0][:200_000]
    num_ids = len(tokenizer.encode(sample, add_special_tokens=False).ids)
    print(f"{tokenizer.get_vocab_size()} entries, {len(sample.encode()) / num_ids:.3f} bytes per token")


if __name__ == "__main__":
    main()
