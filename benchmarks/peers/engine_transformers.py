"""transformers: ``generate`` with sdpa attention. Requests of a batch have equal lengths, so nothing is padded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import main
from transformers import AutoModelForCausalLM
from workloads import Item


class TransformersEngine:
    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, **options).eval()
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, items: Sequence[Item]) -> list[int]:
        (count,) = {item.output for item in items}
        ids = torch.tensor([item.prompt for item in items])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        return [out.shape[1] - ids.shape[1]] * len(items)

    def replay(self, items: Sequence[Item]) -> list[int]:
        raise NotImplementedError


if __name__ == "__main__":
    main(TransformersEngine)
