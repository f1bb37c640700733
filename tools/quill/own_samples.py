"""Let Quill continue passages of the training novels, for heads that learn from what it writes itself.

Writes ``own.npy`` beside ``text.npy``: uint16 ``[samples, 1 + passage + tokens]``, each row ``<|bos|>``, a passage and
its continuation. Of ten samples six have T = 0.8, three are greedy and one has T = 1.

Usage: ``python tools/quill/own_samples.py --data /tmp/quill``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from make_data import BOS_ID

from quire import LLM, SamplingParams

TEMPERATURES = (0.8, 0.0, 0.8, 1.0, 0.8, 0.0, 0.8, 0.0, 0.8, 0.8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--passage", type=int, default=48, help="tokens")
    parser.add_argument("--tokens", type=int, default=208, help="of a continuation")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    text = np.load(args.data / "text.npy")
    starts = np.random.default_rng(args.seed).integers(0, text.size - args.passage, args.samples)
    prompts = [[BOS_ID, *text[start : start + args.passage].tolist()] for start in starts]
    params = [
        SamplingParams(temperature=temperature, seed=number, max_tokens=args.tokens, ignore_eos=True)
        for number, temperature in zip(range(args.samples), TEMPERATURES * args.samples, strict=False)
    ]
    llm = LLM("quill", max_model_len=512, kv_memory="256MiB", threads=1)
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    whole = [np.array([*ids, *each.outputs[0].token_ids]) for ids, each in zip(prompts, found, strict=True)]
    tokens = np.stack(whole).astype(np.uint16)
    np.save(args.data / "own.npy", tokens)
    print(f"{args.samples} samples, {tokens.size} tokens")


if __name__ == "__main__":
    main()
