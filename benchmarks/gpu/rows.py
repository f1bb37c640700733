"""The work of a step beside the model, row by row: LoRA adapters, and sampling with and without penalties and masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from benchmarks.gpu.kernels import BF16, Row, row
from benchmarks.gpu.timing import DEVICE, seconds

from quire.kernels.lora import LowRank, add_lora, group_rows, stack_empty, write_slot
from quire.request import SamplingParams
from quire.runner.device_sampler import DeviceSampler
from quire.runner.sequences import WorkerSeqs
from quire.sampling.grammars import Grammars
from quire.sampling.sampler import columns_of
from quire.step import NewSeq


def adapters(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """Eight adapters of rank 16 on the fused q, k, v and on the down projection of an 8B Llama."""
    found: list[Row] = []
    rank, slots = 16, 2 if tiny else 8
    for widths, size in (((32, 16, 16), 64),) if tiny else (((4096, 1024, 1024), 4096), ((4096,), 14336)):
        with DEVICE:
            stack = stack_empty(widths, size, slots, rank, BF16, backend="triton")
        for slot in range(1, slots + 1):
            parts = {
                part: LowRank(torch.randn(rank, size).bfloat16(), torch.randn(width, rank).bfloat16(), 0.5)
                for part, width in enumerate(widths)
            }
            write_slot(stack, slot, parts)
        for count in (1, 5) if tiny else (1, 8, 64, 512, 4096):
            x = torch.randn(count, size, device=DEVICE).bfloat16()
            y = torch.zeros(count, sum(widths), device=DEVICE, dtype=BF16)
            grouped = group_rows(np.arange(count) % slots + 1, slots)
            taken_s = seconds([lambda: add_lora(x, y, stack, grouped)])  # noqa: B023  called at once
            weights = min(count, slots) * rank * (len(widths) * size + sum(widths))
            num_bytes = 2 * (weights + x.numel() + 2 * y.numel())
            flops = 2 * count * rank * (len(widths) * size + sum(widths))
            found.append(row(f"{widths} x {size}, {count} rows", taken_s, num_bytes, flops, limits))
    return found


def samples(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """Sampling of a whole step, with the host's part of it; no step waits for its tokens."""
    count, vocab = (3, 1500) if tiny else (256, 128_256)
    plain = SamplingParams(temperature=0.8, seed=1, max_tokens=4)
    kinds = {
        "plain": (plain, 2),
        "top_p": (replace(plain, top_p=0.9), 2),
        "penalties": (replace(plain, presence_penalty=0.5, repetition_penalty=1.1), 5),
        "allowed_token_ids": (replace(plain, allowed_token_ids=tuple(range(0, vocab, 3))), 4),
        "logprobs": (replace(plain, logprobs=5), 4),
    }
    logits = torch.randn(count, vocab, device=DEVICE)
    found = []
    for name, (params, passes) in kinds.items():
        grammars = Grammars("", vocab, 1)
        sampler = DeviceSampler(vocab, grammars, DEVICE)
        table = WorkerSeqs(vocab, count, 128, max_blocks=1, num_groups=1, grammars=grammars)
        prompt = tuple(range(100))
        seqs = [table.admit(NewSeq(i, 0, prompt, (), replace(params, seed=i), 0)) for i in range(count)]
        indices = np.array([seq.row for seq in seqs])
        columns = columns_of(table.columns, indices, table.num_tokens[indices] - 1)
        taken_s = seconds([lambda: sampler.sample(logits, seqs, columns)])  # noqa: B023  called at once
        num_bytes = passes * logits.numel() * 4
        found.append(row(f"{count} x {vocab}, {name}", taken_s, num_bytes, 0, limits))
    return found
