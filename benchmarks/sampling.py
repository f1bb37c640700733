"""Milliseconds of a step's sampling: `python benchmarks/sampling.py [--vocab 128256] [--threads 2]`.

Random logits of two kinds: "peaked" like a model's (spread 3, a few likely ids), "flat" like those of random weights.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from quire.config import RunnerConfig
from quire.device import detect_device
from quire.kernels.registry import choose
from quire.kernels.threads import choose_threads
from quire.request import SamplingParams
from quire.runner.sequences import WorkerSeqs
from quire.runner.verify import verify
from quire.sampling.grammars import Grammars
from quire.sampling.sampler import Sampler, columns_of
from quire.step import NewSeq

KINDS = {
    "greedy": {"temperature": 0.0},
    "T=1": {},
    "top_k=50": {"top_k": 50},
    "top_p=0.9": {"top_p": 0.9},
    "T=1, 5 logprobs": {"logprobs": 5},
}


def milliseconds(params: list[SamplingParams], logits: torch.Tensor, isa: str, rounds: int) -> float:
    """The median of ``rounds`` steps of a sequence per row of ``logits``."""
    vocab = logits.shape[1]
    grammars, sampler = Grammars("", vocab, 1), Sampler(vocab, choose(RunnerConfig(1, "native", isa)))
    table = WorkerSeqs(vocab, len(params), 64, max_blocks=4, num_groups=1, grammars=grammars)
    seqs = [table.admit(NewSeq(i, 0, (1, 2), (), each, 0)) for i, each in enumerate(params)]
    rows = np.array([seq.row for seq in seqs])
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        columns = columns_of(table.columns, rows, table.num_tokens[rows] - 1)
        samples = verify(logits, seqs, columns, sampler)
        table.expect(rows)
        table.settle(seqs, samples)
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[rounds // 2] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--isa", default=detect_device().isa)
    args = parser.parse_args()
    choose_threads(args.threads, torch_is_heavy=True)
    print(f"{args.isa}, vocabulary of {args.vocab}, {args.threads} threads; ms per step")
    for spread, name in ((3.0, "peaked"), (0.1, "flat")):
        for rows in (1, 32):
            logits = torch.randn(rows, args.vocab, generator=torch.Generator().manual_seed(0)) * spread
            for kind, options in KINDS.items():
                params = [
                    SamplingParams(**{"temperature": 1.0, "seed": row, **options})  # type: ignore[arg-type]
                    for row in range(rows)
                ]
                taken_ms = milliseconds(params, logits, args.isa, args.rounds)
                print(f"{name:7} rows {rows:3}  {kind:16} {taken_ms:8.3f}")


if __name__ == "__main__":
    main()
