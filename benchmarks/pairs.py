"""Speculation on a 1B architecture beside theory and beside llama.cpp, on constructed pairs (`make_pair.py`).

    python benchmarks/pairs.py [--home /tmp/pairs] [--formats bf16,int8,int4] [--parts pairs,lookup]
                               [--peer /tmp/peers/llama-native/bin] [--clock cpu --threads 1] [--out FILE.md]

pairs    each format × α × γ, by `quire bench speculate`: tokens per round against theory, speed-up against tokens per
         round ÷ (γ·c + v)
lookup   prompt lookup on a prompt that the answer copies except for a share of changed tokens, as an edit does

With --peer, llama-server runs the same pair as GGUF beside both, plain, with the draft model and with its n-gram
lookup, each at its best number of drafts; the last column is Quire's speed-up ÷ llama.cpp's. Times are those of
decoding: prompts are cached. On a busy machine take ``--clock cpu --threads 1``: seconds of the processes alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import make_pair

from quire.args import EngineArgs
from quire.scheduler.settings import PolicyChange
from quire_lab.bench.offline import OfflineEngine
from quire_lab.bench.speculate import CpuClock
from quire_lab.workload.request import WorkloadRequest

PEERS = Path(__file__).resolve().parent / "peers"
GGUF = {"bf16": None, "int8": "q8_0", "int4": "q4_0"}
FIRST_ID = 300  # below are special tokens and bytes
PASSAGE = 320  # tokens that a prompt of "lookup" copies


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", type=Path, default=Path("/tmp/pairs"))
    parser.add_argument("--arch", default="llama-1b", choices=make_pair.ARCHITECTURES)
    parser.add_argument("--formats", default="bf16,int8,int4")
    parser.add_argument("--alphas", default="0.5,0.7,0.8,0.9")
    parser.add_argument("--drafts", default="2,4,8")
    parser.add_argument("--parts", default="pairs,lookup")
    parser.add_argument("--changed", type=float, default=0.05, help="lookup: share of the tokens that differ")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--peer", type=Path, help="folder of llama-server and llama-quantize")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    alphas = [float(part) for part in args.alphas.split(",")]
    drafts = {alpha: f"draft-{alpha:g}" for alpha in alphas}
    if not all((args.home / name / "model.safetensors").exists() for name in ("target", *drafts.values())):
        make_pair.make(args.home, drafts, args.arch)
    text = []
    for format_ in args.formats.split(","):
        if "pairs" in args.parts:
            text += [of_pairs(args, format_, alphas)]
        if "lookup" in args.parts:
            text += [of_lookup(args, format_)]
    if args.out:
        args.out.write_text("\n".join(text))


def say(lines: Sequence[str]) -> str:
    print("\n".join(lines), flush=True)
    return "\n".join(lines) + "\n"


def of_pairs(args: argparse.Namespace, format_: str, alphas: Sequence[float]) -> str:
    """Run one format with each α; return a table."""
    head = "| α | drafts | × plain | formula | of it | tokens per round | theory | of it | c | v |"
    lines = [f"\n**{format_}, draft model, batch 1**\n", head, "|---" * 10 + "|"]
    best: dict[float, float] = {}
    for alpha in alphas:
        rows = bench(args, format_, alpha)
        for row in rows:
            name = "auto" if row["drafts"] is None else row["drafts"]
            if row["drafts"] != 0:
                best[alpha] = max(best.get(alpha, 0.0), row["speedup"])
            if row["drafts"]:
                per_round, theory = row["tokens_per_round"], row["expected_tokens"]
                share = row["speedup"] / row["expected_speedup"]
                cells = [f"{row['speedup']:.2f}", f"{row['expected_speedup']:.2f}", f"{share:.1%}"]
                cells += [f"{per_round:.2f}", f"{theory:.2f}", f"{per_round / theory:.1%}"]
                cells += [f"{row['c']:.3f}", f"{row['v']:.2f}"]
            else:
                name = "plain" if row["drafts"] == 0 else name
                cells = [f"{row['speedup']:.2f}", f"{row['tokens_per_s']:.1f} tokens/s", *[""] * 6]
            lines.append(f"| {alpha:g} | {name} | {' | '.join(cells)} |")
    if args.peer is not None:
        lines += ["", "| α | llama.cpp, best | Quire, best | Quire ÷ llama.cpp |", "|---|---|---|---|"]
        walk = [ids(args, seed=3)[:3]]
        for alpha in alphas:
            counts = [int(part) for part in args.drafts.split(",")]
            theirs = peer_speedup(args, format_, walk[0], f"draft-{alpha:g}", counts)
            lines.append(f"| {alpha:g} | {theirs:.2f} | {best[alpha]:.2f} | {best[alpha] / theirs:.2f} |")
    return say(lines)


def bench(args: argparse.Namespace, format_: str, alpha: float) -> list[dict[str, Any]]:
    out = args.home / f"{format_}-{alpha:g}.json"
    command = [sys.executable, "-m", "quire.cli", "bench", "speculate", str(args.home / "target"), "--draft-model",
               str(args.home / f"draft-{alpha:g}"), "--threads", str(args.threads), "--clock", args.clock, "--rounds",
               str(args.rounds), "--batch-sizes", "1", "--drafts", args.drafts, "--output-len", str(args.tokens),
               "--kv-memory", "128MiB", "--max-model-len", "1024", "--json", str(out)]  # fmt: skip
    command += [] if format_ == "bf16" else ["--quantize", format_]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return list(json.loads(out.read_text()))


def ids(args: argparse.Namespace, seed: int = 0) -> list[int]:
    """Return a walk of the target without special ids: what it decodes greedily behind the first one."""
    follow = make_pair.successors().tolist()
    rng = random.Random(seed)
    length = PASSAGE + 8
    while True:
        walk = [rng.randrange(FIRST_ID, len(follow))]
        while len(walk) < length and follow[walk[-1]] >= 2:  # but the end of a text
            walk.append(follow[walk[-1]])
        if len(walk) == length:
            return walk


@dataclass
class Given:
    """A `quire_lab.workload.request.PromptMaker` of given tokens."""

    tokens: list[int]

    def token_ids(self, work: WorkloadRequest) -> list[int]:
        return self.tokens


def of_lookup(args: argparse.Namespace, format_: str) -> str:
    """Measure prompt lookup on one prompt; return a table."""
    walk, rng = ids(args), random.Random(1)
    edited = [rng.randrange(FIRST_ID, 4096) if rng.random() < args.changed else each for each in walk]
    prompt = [*edited, *walk[:3]]
    engine = OfflineEngine(
        EngineArgs(str(args.home / "target"), speculate="ngram", spec_tokens="auto", threads=args.threads, quantize=None
                   if format_ == "bf16" else format_, kv_memory="128MiB", max_model_len=1024),
        clock=CpuClock() if args.clock == "cpu" else None,
    )  # fmt: skip
    work, found = [WorkloadRequest(0.0, len(prompt), args.tokens, index=0)], {}
    for name in ("0", *args.drafts.split(","), "auto"):
        most = 8 if name == "auto" else int(name)
        engine.change(PolicyChange(max_num_drafts=most, adaptive_drafts=name == "auto"))
        before = engine.stats()
        times = [engine.run(work, Given(prompt)).duration_s for _ in range(args.rounds + 1)][
            1:
        ]  # the first caches
        after = engine.stats()
        count = after.num_verifications - before.num_verifications
        steps = (after.num_steps - before.num_steps) / (args.rounds + 1)
        accepted = after.num_accepted_tokens - before.num_accepted_tokens
        found[name] = min(times), args.tokens / steps, accepted / count if count else 0.0
    engine.close()
    plain_s = found["0"][0]
    head = "| drafts | × plain | tokens per step | accepted per verification |"
    lines = [
        f"\n**{format_}, prompt lookup, {args.changed:.0%} of the prompt changed**\n",
        head,
        "|---" * 4 + "|",
    ]
    lines += [
        f"| {name} | {plain_s / s:.2f} | {per:.2f} | {acc:.2f} |" for name, (s, per, acc) in found.items()
    ]
    if args.peer is not None:
        ours = max(plain_s / s for s, _, _ in found.values())
        counts = [int(part) for part in args.drafts.split(",")]
        theirs = peer_speedup(args, format_, prompt, None, counts)
        lines.append(
            f"\nllama.cpp's lookup, best: {theirs:.2f}; Quire, best: {ours:.2f}; ratio {ours / theirs:.2f}"
        )
    return say(lines)


def peer_speedup(
    args: argparse.Namespace, format_: str, prompt: list[int], draft: str | None, counts: Sequence[int]
) -> float:
    """Return llama-server's best speed-up over its plain decoding, with ``draft`` or with its n-gram lookup."""
    plain_s = peer_seconds(args, format_, prompt, [])
    times = []
    for count in counts:
        if draft is None:
            flags = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m",
                     str(count), "--spec-draft-n-max", str(count)]  # fmt: skip
        else:
            model = gguf(args, draft, None)
            flags = [
                "--spec-type",
                "draft-simple",
                "-md",
                str(model),
                "--spec-draft-n-max",
                str(count),
                "-td",
                str(args.threads),
            ]
        times.append(peer_seconds(args, format_, prompt, flags))
    return plain_s / min(times)


def gguf(args: argparse.Namespace, name: str, kind: str | None) -> Path:
    plain = args.home / f"{name}.bf16.gguf"
    if not plain.exists():
        subprocess.run(
            [sys.executable, PEERS / "gguf_checkpoint.py", args.home / name, plain], check=True, cwd=PEERS
        )
    if kind is None:
        return plain
    made = args.home / f"{name}.{kind}.gguf"
    if not made.exists():
        subprocess.run(
            [args.peer / "llama-quantize", plain, made, kind.upper()], check=True, capture_output=True
        )
    return made


def peer_seconds(args: argparse.Namespace, format_: str, prompt: list[int], flags: list[str]) -> float:
    """Return llama-server's least seconds of decoding behind ``prompt``, which a first round caches."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads, server_at = str(args.threads), ["--host", "127.0.0.1", "--port", str(port)]
    command = [str(args.peer / "llama-server"), "-m", str(gguf(args, "target", GGUF[format_])), "-t", threads, "-tb",
               threads, "-np", "1", "-c", "1024", "-fa", "on", *server_at, *flags]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + 300
        while not healthy(url):
            assert server.poll() is None, f"{' '.join(command)} ended with {server.returncode}"
            assert time.monotonic() < deadline_s, "llama-server does not answer"
            time.sleep(0.2)
        times = []
        for _ in range(args.rounds + 1):
            before_s = cpu_seconds(server.pid)
            decoded_s = complete(url, prompt, args.tokens)
            times.append(decoded_s if args.clock == "wall" else cpu_seconds(server.pid) - before_s)
        return min(times[1:])
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def healthy(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url + "/health", timeout=1).status == 200)
    except OSError:
        return False


def complete(url: str, prompt: list[int], tokens: int) -> float:
    """Return llama-server's own seconds of decoding."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": True}
    request = urllib.request.Request(
        url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = json.load(urllib.request.urlopen(request, timeout=600))
    assert answer["tokens_predicted"] == tokens, answer
    return float(answer["timings"]["predicted_ms"]) / 1e3


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
