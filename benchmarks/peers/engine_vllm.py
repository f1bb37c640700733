"""vLLM for CPU: the offline API, prefix caching on, compiled (its default)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{os.cpu_count() - 1}")  # type: ignore[operator]
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# The engine in this process: its loop can then be stepped for D, and two cores serve one process less.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from measure import main, replay_steps
from workloads import MAX_CONTEXT, Item


class VllmEngine:
    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(model),
            dtype="bfloat16",
            max_model_len=MAX_CONTEXT,
            enable_prefix_caching=True,
            **options,
        )
        self.num_requests = 0

    def params(self, item: Item) -> Any:
        from vllm import SamplingParams

        return SamplingParams(max_tokens=item.output, temperature=0.0, ignore_eos=True, detokenize=True)

    def generate(self, items: Sequence[Item]) -> list[int]:
        prompts = [{"prompt_token_ids": item.prompt} for item in items]
        outputs = self.llm.generate(prompts, [self.params(item) for item in items], use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def replay(self, items: Sequence[Item]) -> list[int]:
        engine, counts = self.llm.llm_engine, [0] * len(items)
        self.num_requests += 1

        def submit(index: int, item: Item) -> None:
            name = f"replay{self.num_requests}-{index}"
            engine.add_request(name, {"prompt_token_ids": item.prompt}, self.params(item))

        def step() -> None:
            for output in engine.step():
                if output.finished:
                    index = int(output.request_id.split("-")[1])
                    counts[index] = len(output.outputs[0].token_ids)

        replay_steps(items, submit, step, engine.has_unfinished_requests)
        return counts


if __name__ == "__main__":
    main(VllmEngine)
