"""OpenVINO GenAI: LLMPipeline for one request, its continuous-batching pipeline with prefix caching for more.

Both are loaded: LLMPipeline is what its guide names for one stream, and the faster there. Its defaults otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from measure import main, replay_steps
from workloads import Item


def generation(item: Item) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = item.output
    config.ignore_eos = True
    config.do_sample = False
    return config


def tensor(item: Item) -> openvino.Tensor:
    return openvino.Tensor(np.array([item.prompt], dtype=np.int64))


class OpenvinoEngine:
    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 4  # GB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        self.pipe = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", options)
        self.single = openvino_genai.LLMPipeline(str(model), "CPU", **options)

    def generate(self, items: Sequence[Item]) -> list[int]:
        if len(items) == 1:
            return [len(self.single.generate(tensor(items[0]), generation(items[0])).tokens[0])]
        results = self.pipe.generate([tensor(i) for i in items], [generation(i) for i in items])
        return [len(result.m_generation_ids[0]) for result in results]

    def replay(self, items: Sequence[Item]) -> list[int]:
        handles: dict[int, Any] = {}

        def submit(index: int, item: Item) -> None:
            handles[index] = self.pipe.add_request(index, tensor(item), generation(item))

        replay_steps(items, submit, self.pipe.step, self.pipe.has_non_finished_requests)
        counts = []
        for index in range(len(items)):
            counts.append(sum(len(output.generated_ids) for output in handles[index].read_all()))
        return counts


if __name__ == "__main__":
    main(OpenvinoEngine)
