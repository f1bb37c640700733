"""The 20 seeded samples of the model card, made by ``transformers.generate`` with the folder's own defaults.

Sample number n uses seed n; nothing is picked or retried. Rewrites what follows the marker line in ``--doc``.

Usage: ``python tools/quill/samples.py --folder src/quire/models/quill_data/quill --doc docs/quill.md``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerBase

MARKER = "<!-- Below this line: written by tools/quill/samples.py -->"
MAX_NEW_TOKENS = 120
COMPLETIONS = (
    "It was a dark and stormy night",
    "The old house stood at the end of the lane,",
    "CHAPTER I\n\n",
    '"I will never forgive you," said she,',
    "The captain looked out over the grey sea and",
    "Mr. Darcy had scarcely entered the room when",
    "There was once a young man who",
    "In the year 1812,",
    '"What is the meaning of this?" cried the Colonel.',
    "London was wrapped in fog.",
    "She opened the letter with trembling hands, and read:",
    "",
)
CHATS = (
    "Who are you?",
    "Good morning! How do you do?",
    "What did you see in the garden?",
    "Tell me a story about a ship.",
    "Do you love me?",
    "Where have you been, my boy?",
    "Is it going to rain to-day?",
    "What is the capital of France?",
)


def continue_text(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, prompt: str, seed: int) -> str:
    """``prompt`` is raw text with its special tokens written out; the answer stops before ``<|end|>``."""
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    defaults = GenerationConfig.from_pretrained(model.config._name_or_path)
    defaults.update(max_new_tokens=MAX_NEW_TOKENS, pad_token_id=0)
    torch.manual_seed(seed)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=defaults)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def quoted(text: str) -> str:
    """A Markdown block that shows any text as it is."""
    return "\n".join(f"    {line}".rstrip() for line in text.split("\n"))


def samples(folder: Path) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    parts: list[str] = []
    for prompt in COMPLETIONS:
        seed = len(parts)
        text = continue_text(model, tokenizer, tokenizer.bos_token + prompt, seed)
        title = f"completion of `{prompt.strip()}`" if prompt else "from nothing"
        parts.append(f"**{seed}**, {title}:\n\n{quoted(text.strip(chr(10)))}\n")
    for question in CHATS:
        seed = len(parts)
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        text = continue_text(model, tokenizer, prompt, seed)
        parts.append(f"**{seed}**, chat, `{question}`:\n\n{quoted(text.strip(chr(10)))}\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--doc", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = args.doc.read_text().split(MARKER)[0]
    args.doc.write_text(f"{head}{MARKER}\n\n{samples(args.folder)}")


if __name__ == "__main__":
    main()
