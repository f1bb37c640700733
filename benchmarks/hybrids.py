"""Speeds of models with recurrent layers, next to llama.cpp: `python -m benchmarks.hybrids --models qwen3.5-0.8b`.

    decode    alone and 32 at once, in tokens per second, and as a share of what its bytes allow: the weights, keys and
              values once per step, each state read and written, at what a probe of this turn reads
    prompts   512 and 2,048 tokens
    again     4,096 tokens: cold; the same; another last message of 30 tokens; only a system prompt of 3,072 tokens is
              shared, at its third use

Turns alternate between the engines, and a figure is the median of its turns. ``--tools DIR`` has llama.cpp's
`llama-bench` and `llama-batched-bench`, ``--gguf`` the same checkpoint in bf16 (its own `convert_hf_to_gguf.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.make_checkpoint import make

from quire import LLM, SamplingParams, _native
from quire.cost.split import Split, shard_of
from quire.models.checkpoint import spec_of
from quire.modelspec import ModelSpec
from quire_lab.plan.memory import kv_bytes_per_request

NUM_THREADS = len(os.sched_getaffinity(0))
NUM_DECODED, NUM_AT_ONCE, NUM_BEFORE = 64, 32, 64
PROMPTS = (512, 2048)
LONG, LAST, SYSTEM = 4096, 30, 3072
Figures = dict[str, float]


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 15000) for _ in range(count)]


def seconds(llm: LLM, prompts: Sequence[list[int]], num_tokens: int) -> float:
    """Return the time of ``num_tokens`` tokens behind each of ``prompts``."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


def quire_turn(llm: LLM, rng: random.Random) -> Iterator[tuple[str, float]]:
    """Yield the figures of one turn."""
    for count in (1, NUM_AT_ONCE):
        prompts = [random_ids(rng, NUM_BEFORE) for _ in range(count)]
        seconds(llm, prompts, 1)  # so that both find most of their prompts in the cache
        first, whole = seconds(llm, prompts, 1), seconds(llm, prompts, NUM_DECODED + 1)
        yield f"decode {count}", count * NUM_DECODED / (whole - first)
    for count in PROMPTS:
        yield f"prompt {count}", count / seconds(llm, [random_ids(rng, count)], 1)


def again_turn(llm: LLM, rng: random.Random) -> Iterator[tuple[str, float]]:
    """Yield how many times sooner the first token of a warm prompt is there."""
    prompt, system = random_ids(rng, LONG), random_ids(rng, SYSTEM)
    cold = seconds(llm, [prompt], 1)
    yield "cold ms", 1e3 * cold
    yield "same", cold / seconds(llm, [prompt], 1)
    yield "last message", cold / seconds(llm, [[*prompt[:-LAST], *random_ids(rng, LAST)]], 1)
    uses = [seconds(llm, [[*system, *random_ids(rng, LONG - SYSTEM)]], 1) for _ in range(3)]
    yield "system prompt", cold / uses[-1]


def llama_turn(tools: Path, gguf: Path) -> Iterator[tuple[str, float]]:
    """Yield the same figures of llama.cpp's own benchmarks."""
    base = ["-m", str(gguf), "-t", str(NUM_THREADS)]
    lengths = ",".join(map(str, PROMPTS))
    bench = [tools / "llama-bench", *base, "-p", lengths, "-n", str(NUM_DECODED), "-r", "1", "-o", "jsonl"]
    for row in _rows(bench):
        name = f"prompt {row['n_prompt']}" if row["n_prompt"] else "decode 1"
        yield name, row["avg_ts"]
    many = [
        tools / "llama-batched-bench",
        *base,
        "-tb",
        str(NUM_THREADS),
        "-c",
        "8192",
        "-npp",
        str(NUM_BEFORE),
    ]
    many += ["-ntg", str(NUM_DECODED), "-npl", str(NUM_AT_ONCE), "--output-format", "jsonl"]
    for row in _rows(many):
        yield f"decode {NUM_AT_ONCE}", row["speed_tg"]


def _rows(command: Sequence[object]) -> list[dict[str, float]]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} ended with {done.returncode}: {done.stderr[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def bound(spec: ModelSpec, count: int, bandwidth: float) -> float:
    """Return the tokens per second that the bytes of a step of ``count`` sequences allow at ``bandwidth`` bytes/s."""
    shard = shard_of(spec, "bf16", Split())
    # With the state once, which is also written.
    request = kv_bytes_per_request(spec, NUM_BEFORE + NUM_DECODED // 2) + spec.state_bytes_per_sequence
    return count * bandwidth / (shard.dense_bytes + shard.head_bytes + count * request)


def measure(name: str, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the figures of every turn, by engine and name."""
    figures: dict[str, dict[str, list[float]]] = {"quire": defaultdict(list), "llama.cpp": defaultdict(list)}
    rng = random.Random(0)
    path = str(make(name, args.out))
    spec, llm = spec_of(path), LLM(path, max_model_len=8192, max_num_seqs=NUM_AT_ONCE)
    seconds(llm, [random_ids(rng, 300)], 8)
    for _ in range(args.turns):
        bandwidth = (1 << 30) / _native.probe_read(NUM_THREADS, 1 << 30, 1)
        figures["quire"]["GB/s"].append(bandwidth / 1e9)
        for what, figure in [*quire_turn(llm, rng), *again_turn(llm, rng)]:
            figures["quire"][what].append(figure)
        for count in (1, NUM_AT_ONCE):
            share = figures["quire"][f"decode {count}"][-1] / bound(spec, count, bandwidth)
            figures["quire"][f"share of bound {count}"].append(share)
        for what, figure in llama_turn(args.tools, args.gguf[name]) if name in args.gguf else ():
            figures["llama.cpp"][what].append(figure)
        print(name, {what: round(rows[-1], 2) for what, rows in figures["quire"].items()}, flush=True)
        print(
            "llama.cpp", {what: round(rows[-1], 2) for what, rows in figures["llama.cpp"].items()}, flush=True
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["qwen3.5-0.8b", "lfm2-350m"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--tools", type=Path, help="folder of llama.cpp's tools")
    parser.add_argument("--gguf", nargs="*", default=[], help="MODEL=FILE")
    args = parser.parse_args()
    args.gguf = {name: Path(path) for name, path in (pair.split("=", 1) for pair in args.gguf)}
    for name in args.models:
        figures = measure(name, args)
        for engine, rows in figures.items():
            for what, values in rows.items():
                print(f"{name} | {engine} | {what} | {statistics.median(values):.2f} | {values}")


if __name__ == "__main__":
    main()
