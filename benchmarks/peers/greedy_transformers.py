"""Greedy answers of transformers to prompts of token ids, from the expanded weights of a GGUF file, in fp32.

    python greedy_transformers.py FILE.gguf < PROMPTS.json

Runs where transformers, gguf and accelerate are installed. stdin: a JSON list of lists of ids. The last line of stdout:
a JSON list of texts, of at most 16 tokens each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Answer each prompt."""
    file = Path(sys.argv[1]).expanduser()
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = []
    for ids in json.load(sys.stdin):
        out = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
        texts.append(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
    print(json.dumps(texts))


if __name__ == "__main__":
    main()
