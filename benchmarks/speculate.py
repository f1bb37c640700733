"""Speculation by wall clock beside plain decoding and beside theory, on one machine and in one run.

Rounds alternate between the settings, so that a busy machine is unfair to none, and the best round of each counts.
Every answer is compared with plain decoding: a difference ends the benchmark. For a fixed number of drafts γ, the table
has the tokens per verification that Leviathan et al. 2023 expect from the measured acceptance α:
(1 − α^(γ+1)) / (1 − α). "v + γ·c" is what a round of drafts and their verification takes, in steps of plain
decoding; the bound is the speed-up if it took one.

    python benchmarks/speculate.py [MODEL] [--settings draft:4,ngram:auto …] [--tokens 200] [--rounds 5] [--batch 1]
"""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.device import cpu_name

PROSE = (
    "It was a dark and stormy night; the rain fell in torrents, and the",
    "Once upon a time there was a little girl who lived in a small house near the",
    "In the beginning the captain of the ship had said that nobody would",
    "The old man looked out of the window and saw that the street was",
)
EDIT = (
    "Copy the text. Text: The quick brown fox jumps over the lazy dog near the river bank, and then the fox sleeps. "
    "Copy: The quick brown fox jumps over the lazy dog near the river bank, and then the fox sleeps. Copy:"
)
CODE = (Path(__file__).parents[1] / "src" / "quire" / "speculate" / "ngram.py").read_text()
RENAME = (
    "<|im_start|>user\nRename the variable `seen` to `automaton` in this file. Answer with the whole file only.\n"
    f"```python\n{CODE}\n```<|im_end|>\n<|im_start|>assistant\n```python\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="quill")
    parser.add_argument(
        "--settings", default="draft:2,draft:4,draft:auto,self:int8:4,self:int4:auto,ngram:4,ngram:auto"
    )
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1, help="sequences at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: of this process, with one thread"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--text",
        default="prose",
        help="prose, edit, code (a chat of Qwen's), or a file (.gz) whose paragraphs are continued",
    )
    parser.add_argument("--passages", type=int, default=4, help="of a file, at even distances")
    args = parser.parse_args()
    texts = {"prose": PROSE, "edit": (EDIT,), "code": (RENAME,)}.get(args.text) or passages(
        Path(args.text), args.passages
    )
    prompts = [f"{texts[i % len(texts)]}" for i in range(max(args.batch, len(texts)))]
    params = SamplingParams(temperature=args.temperature, seed=1, max_tokens=args.tokens, ignore_eos=True)
    names = ["plain", *args.settings.split(",")]
    shared = {"max_model_len": 2048, "kv_memory": "256MiB", "threads": args.threads}
    engines = {name: LLM(args.model, **shared, **keywords(name)) for name in names}
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    times: dict[str, list[float]] = {name: [] for name in names}
    answers: dict[str, Any] = {}
    for turn in range(args.rounds + 1):
        for name, llm in engines.items():
            start = clock()
            found = [
                output.outputs[0].token_ids
                for at in range(0, len(prompts), args.batch)
                for output in llm.generate(prompts[at : at + args.batch], params)
            ]
            if turn:  # the first round warms up
                times[name].append(clock() - start)
            if answers.setdefault("plain", found) != found:
                raise SystemExit(f"{name} does not give the tokens of plain decoding")
    print(
        f"{args.model} on {cpu_name()}: batch {args.batch}, {Path(args.text).name}, T = {args.temperature:g}, "
        f"{args.threads} threads, {args.clock} time"
    )
    print(
        "| setting | tokens/s | × plain | α | α by position | tokens per verification | expected | v + γ·c | bound |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, llm in engines.items():
        print(row(name, llm, min(times[name]), min(times["plain"]), len(prompts) * args.tokens))


def passages(path: Path, count: int) -> tuple[str, ...]:
    """Return the beginnings of ``count`` long paragraphs of a text."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    long = [" ".join(part.split())[:240] for part in text.split("\n\n") if len(part) > 400]
    return tuple(long[len(long) * i // count].rpartition(" ")[0] for i in range(count))


def keywords(name: str) -> dict[str, Any]:
    if name == "plain":
        return {}
    method, _, count = name.rpartition(":")
    found: dict[str, Any] = {"spec_tokens": count if count == "auto" else int(count)}
    return found | ({"draft_model": method} if method.startswith("self:") else {"speculate": method})


def row(name: str, llm: LLM, seconds: float, plain_s: float, num_tokens: int) -> str:
    stats = llm.client.core.stats()
    cells = [f"{num_tokens / seconds:.0f}", f"{plain_s / seconds:.2f}", "", "", "", "", "", ""]
    if stats.num_verifications:
        accepted, drafted, count = stats.num_accepted_tokens, stats.num_draft_tokens, stats.num_verifications
        most = drafted / count
        # Verifications that end in a rejection tried one draft more than they accepted.
        tried = accepted + sum(a - b for a, b in pairs(count, stats.accepted_at, round(most)))
        alpha = accepted / tried
        by_position = [b / a for a, b in pairs(count, stats.accepted_at, round(most)) if a]
        per_round = 1 + accepted / count
        cells[2:5] = [f"{alpha:.3f}", " ".join(f"{each:.2f}" for each in by_position), f"{per_round:.2f}"]
        if not name.endswith("auto") and alpha < 1.0:
            cells[5] = f"{(1 - alpha ** (most + 1)) / (1 - alpha):.2f}"
            # What a round takes, in steps of plain decoding; and the speed-up, were drafts and their rows for nothing.
            cells[6:] = [f"{per_round * seconds / plain_s:.2f}", f"{per_round:.2f}"]
    return f"| {name} | {' | '.join(cells)} |"


def pairs(count: int, accepted_at: tuple[int, ...], most: int) -> list[tuple[int, int]]:
    """Return (reached, accepted) of each position: what was accepted before it reached it."""
    reached = [count, *accepted_at]
    return list(zip(reached[:most], accepted_at[:most], strict=True))


if __name__ == "__main__":
    main()
