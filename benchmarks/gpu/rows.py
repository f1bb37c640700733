"""What a step does row by row beside the model: adapters of LoRA, and draws with and without penalties and masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from benchmarks.gpu.kernels import BF16, Row, row
from benchmarks.gpu.timing import DEVICE, seconds

from quire.kernels.lora import LowRank, add_lora, group_rows, stack_empty, write_slot
from quire.request import SamplingParams
from quire.runner.device_sampler import DeviceSampler
from quire.runner.grammars import Grammars
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


def draws(limits: dict[str, float], *, tiny: bool) -> list[Row]:
    """Draws of a whole step, the host's part of it included; none waits for what it drew."""
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
        sampler = DeviceSampler(vocab, Grammars("", vocab, 1), DEVICE)
        for i in range(count):
            sampler.add(NewSeq(i, 0, tuple(range(100)), (), replace(params, seed=i), 0))
        taken_s = seconds([lambda: sampler.draw(logits, range(count))])  # noqa: B023  called at once
        num_bytes = passes * logits.numel() * 4
        found.append(row(f"{count} x {vocab}, {name}", taken_s, num_bytes, 0, limits))
    return found
