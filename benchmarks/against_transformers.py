"""Quire beside `transformers` on the same checkpoint in the same run.

    python benchmarks/against_transformers.py single --model /tmp/models/llama-1b
    python benchmarks/against_transformers.py batch  --model /tmp/models/llama-1b --requests 256

single: one stream, greedy, `--prompt` tokens in and `--output` out; the two sides take turns, medians and ratio.
batch:  `--requests` requests of `--prompt` tokens, output lengths uniform in 8…256, at most 32 running. Quire with the
        continuous and the static gate, and `transformers.generate` in left-padded batches of 32, each batch as
        long as its longest; useful output tokens/s (tokens beyond a request's length do not count).
Figures go to stdout as JSON and, with --append, as one line to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams

THREADS = len(os.sched_getaffinity(0))


def load_reference(path: str) -> Any:
    torch.set_num_threads(THREADS)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def random_prompt(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab // 2) for _ in range(length)]


def reference_generate(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds of one `generate` call over equally long prompts (left padding is then empty)."""
    ids = torch.tensor(prompts)
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - begin


def quire_generate(llm: LLM, prompts: list[list[int]], lengths: list[int]) -> float:
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    begin = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
    return seconds


def engine(given: argparse.Namespace, gate: str) -> LLM:
    # Prefix caching off: random prompts share nothing, and repeated rounds must not find each other's blocks.
    return LLM(
        given.model,
        max_num_seqs=32,
        max_model_len=2048,
        gate=gate,
        kv_memory="3GiB",
        enable_prefix_caching=False,
    )


def single(given: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(given.seed)
    reference, llm = load_reference(given.model), engine(given, "continuous")
    vocab = reference.config.vocab_size
    ours, theirs = [], []
    for _ in range(given.rounds):
        prompt = random_prompt(rng, given.prompt, vocab)
        ours.append(given.output / quire_generate(llm, [prompt], [given.output]))
        theirs.append(given.output / reference_generate(reference, [prompt], given.output))
    return {
        "quire_tokens_per_s": statistics.median(ours),
        "transformers_tokens_per_s": statistics.median(theirs),
        "ratio": statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "rounds": given.rounds,
    }


def batch(given: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(given.seed)
    vocab = json.loads((Path(given.model) / "config.json").read_text())["vocab_size"]
    prompts = [random_prompt(rng, given.prompt, vocab) for _ in range(given.requests)]
    lengths = [rng.randint(8, 256) for _ in prompts]
    useful = sum(lengths)
    rates: dict[str, float] = {}
    for gate in ("continuous", "static"):
        llm = engine(given, gate)
        quire_generate(llm, prompts[:2], [4, 4])
        rates[gate] = useful / quire_generate(llm, prompts, lengths)
        print(json.dumps({gate: rates[gate]}), flush=True)
        llm.close()
    reference = load_reference(given.model)
    seconds, count = 0.0, min(len(prompts), given.reference_requests or len(prompts))
    for first in range(0, count, 32):
        part = slice(first, min(first + 32, count))
        seconds += reference_generate(reference, prompts[part], max(lengths[part]))
    rates["transformers"] = sum(lengths[:count]) / seconds
    return {
        "useful_tokens_per_s": rates,
        "continuous_over_static": rates["continuous"] / rates["static"],
        "continuous_over_transformers": rates["continuous"] / rates["transformers"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["single", "batch"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument(
        "--reference-requests",
        type=int,
        default=0,
        help="give transformers only the first N (its batches do not influence each other); 0: all",
    )
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens of each request")
    parser.add_argument("--output", type=int, default=64, help="output tokens (single)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--append", type=Path, help="file that gets the result as one JSON line")
    given = parser.parse_args()
    result = {
        "benchmark": f"against_transformers {given.what}",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {THREADS} cores",
        "torch": torch.__version__,
        "model": Path(given.model).name,
        "prompt": given.prompt,
        "requests": given.requests if given.what == "batch" else 1,
        **(single(given) if given.what == "single" else batch(given)),
    }
    print(json.dumps(result, indent=1))
    if given.append:
        with given.append.open("a") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
