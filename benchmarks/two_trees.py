"""Two source trees side by side: the same model, the same requests, in turns. Prints the ratio for each measure.

    python benchmarks/two_trees.py --before ../base --after . --model /tmp/models/llama-1b --rounds 5 [--quantize int8]

Each tree gets one engine in a process of its own, which its ``.venv/bin/python`` runs. Both stay loaded; only one works
at a time. A round measures both trees, in alternating order:

    prefill   one stream, 512 prompt tokens: seconds to its first token
    decode    one stream: seconds per token after the first
    batch     32 requests at once, 128 prompt and 32 output tokens each: seconds in all

A ratio above 1 means that the second tree is faster. It is the median over the rounds of ``before / after``. Each turn
begins after ``--rest`` seconds, in which the engine before it does what it left for later. With ``--processor-time``
engines have one thread, and its processor time counts: for machines that others use as well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

MEASURES = ("prefill", "decode", "batch")


def serve(model: str, options: dict[str, object]) -> None:
    """The child: load the model, then measure once per line on standard input."""
    from quire import LLM, SamplingParams  # the tree's own

    now = time.process_time if options.pop("processor_time", False) else time.perf_counter
    llm = LLM(model, max_model_len=1024, kv_memory="1GiB", **options)
    generator = random.Random(0)

    def timed(num_requests: int, num_prompt: int, num_output: int) -> float:
        prompts = [
            {"prompt_token_ids": [generator.randrange(100, 10_000) for _ in range(num_prompt)]}
            for _ in range(num_requests)
        ]
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        started = now()
        llm.generate(prompts, params, use_tqdm=False)
        return now() - started

    timed(2, 64, 4)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        first = timed(1, 512, 1)
        decode = (timed(1, 64, 33) - timed(1, 64, 1)) / 32
        print(json.dumps({"prefill": first, "decode": decode, "batch": timed(32, 128, 32)}), flush=True)


class Tree:
    """One engine of one source tree."""

    def __init__(self, folder: Path, model: str, options: dict[str, object]) -> None:
        command = [str(folder / ".venv" / "bin" / "python"), __file__, "--serve", model, json.dumps(options)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder / "src")},
        )  # fmt: skip
        assert self.answer() == {"ready": True}

    def answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the engine of {self.process.args} ended")
        return dict(json.loads(line))

    def measure(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("once\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="a source tree with a .venv")
    parser.add_argument("--after", type=Path, required=True, help="another one")
    parser.add_argument("--model", required=True, help="a checkpoint (benchmarks/make_checkpoint.py)")
    parser.add_argument("--quantize", help="int8 or int4; default: as stored")
    parser.add_argument("--cpu-isa", help="level of the kernels")
    parser.add_argument("--processor-time", action="store_true", help="one thread, and its processor time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rest", type=float, default=2.0, help="seconds before each turn")
    args = parser.parse_args()
    options: dict[str, object] = {
        name: value for name in ("quantize", "cpu_isa") if (value := getattr(args, name)) is not None
    }
    if args.processor_time:
        options |= {"processor_time": True, "threads": 1, "packed_cache": "off"}
    trees = [Tree(folder.resolve(), args.model, options) for folder in (args.before, args.after)]
    rounds: list[list[dict[str, float]]] = []
    for number in range(args.rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        measured: dict[int, dict[str, float]] = {}
        for index in order:
            time.sleep(args.rest)
            measured[index] = trees[index].measure()
        rounds.append([measured[0], measured[1]])
        print(json.dumps({"round": number, "before": measured[0], "after": measured[1]}), flush=True)
    for name in MEASURES:
        ratios = sorted(before[name] / after[name] for before, after in rounds)
        print(f"{name:8} {median(ratios):.3f}  ({ratios[0]:.3f} … {ratios[-1]:.3f})")
    for tree in trees:
        tree.close()


if __name__ == "__main__":
    main()
