"""Quire: `quire.LLM` in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import main, replay_steps
from workloads import MAX_CONTEXT, Item

from quire import LLM, SamplingParams
from quire.engine.prompts import prepare_request


class QuireEngine:
    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        settings = {"max_model_len": MAX_CONTEXT, "kv_memory": "2GiB"} | options
        self.llm = LLM(str(model), **settings)
        info = self.llm.info
        self.facts = {"weight_bytes": info.weight_bytes, "kernels": info.kernels, "settings": settings}
        self.num_requests = 0

    def params(self, item: Item) -> SamplingParams:
        return SamplingParams(max_tokens=item.output, temperature=0.0, ignore_eos=True)

    def generate(self, items: Sequence[Item]) -> list[int]:
        prompts = [{"prompt_token_ids": item.prompt} for item in items]
        outputs = self.llm.generate(prompts, [self.params(item) for item in items], use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def replay(self, items: Sequence[Item]) -> list[int]:
        # `LLM` has no call for arrivals over time (a server is for that), so the same client is driven from here.
        client, llm = self.llm.client, self.llm
        counts, open_ = [0] * len(items), set()
        self.num_requests += 1

        def submit(index: int, item: Item) -> None:
            request = prepare_request(
                f"replay{self.num_requests}-{index}", item.prompt, self.params(item), llm.model,
                llm.get_tokenizer(), arrival_s=llm._clock.now(), seed=index,
            )  # fmt: skip
            open_.add(index)
            client.send(request)

        def step() -> None:
            for event in client.receive():
                index = int(event.request_id.split("-")[1])
                counts[index] += len(event.token_ids)
                if event.finish_reason is not None:
                    open_.discard(index)

        replay_steps(items, submit, step, lambda: bool(open_))
        return counts


if __name__ == "__main__":
    main(QuireEngine)
