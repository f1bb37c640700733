"""Bits per byte of an exported folder on the validation novels, computed by ``transformers``.

Protocol: each novel by itself. Windows of 1,024 inputs (``<|bos|>`` and the 1,023 tokens before the last target) move
by ``--stride`` 512 tokens; the first window of a novel scores all its targets, the others the last 512, so that all
but the first 512 tokens of a novel have at least 512 tokens of context. Nats of all tokens / ln 2 / UTF-8 bytes of the
text. ``<|bos|>`` is never a target and the document separator counts on neither side.

Usage: ``python tools/quill/evaluate.py --folder src/quire/models/quill_data/quill --data /tmp/quill --dtype bfloat16``
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from make_data import BOS_ID, documents
from transformers import LlamaForCausalLM

WINDOW = 1024


def windows(num_tokens: int, stride: int) -> list[tuple[int, int]]:
    """(start, first scored target) of each window; every target is scored once."""
    result = [(0, 0)]
    while result[-1][0] + WINDOW < num_tokens:
        start = result[-1][0] + stride
        result.append((start, start + WINDOW - stride))
    return result


def document_nats(model: LlamaForCausalLM, tokens: np.ndarray, stride: int) -> float:
    total = 0.0
    for start, first in windows(tokens.size, stride):  # one at a time: the logits are the memory
        targets = torch.from_numpy(tokens[start : start + WINDOW].astype(np.int64))
        ids = torch.cat([torch.tensor([BOS_ID]), targets[:-1]])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, first - start :].float()
        total += float(F.cross_entropy(logits, targets[first - start :], reduction="sum"))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the arithmetic"
    )
    parser.add_argument("--stride", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, args.dtype))
    texts = documents(np.load(args.data / "valid.npy"))
    num_bytes = json.loads((args.data / "data.json").read_text())["valid_bytes"]
    num_tokens = sum(text.size for text in texts)
    nats = sum(document_nats(model, text, args.stride) for text in texts)
    print(f"{args.folder.name} in {args.dtype}: {num_tokens} tokens, {num_bytes} bytes")
    print(f"{nats / num_tokens:.4f} nats per token, {nats / math.log(2) / num_bytes:.4f} bits per byte")


if __name__ == "__main__":
    main()
