"""The cost of a grammar in a step: the same requests with and without one, and the masks by themselves.

    python benchmarks/make_checkpoint.py llama-1b --out /tmp/models
    python benchmarks/grammar_masks.py /tmp/models/llama-1b --tokenizer ../shared/data/tokenizers/llama3

32 requests decode together; a step is timed from the worker's side. Random weights sample any allowed token, so
the constrained answers are JSON of random words: long strings, numbers and punctuation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.sampling.grammars import Grammars, GrammarState

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "minLength": 80},
        "rows": {"type": "array", "minItems": 50, "items": {
            "type": "object", "properties": {"id": {"type": "integer"}, "kind": {"enum": ["red", "green", "blue"]},
                                             "note": {"type": "string"}},
            "required": ["id", "kind", "note"], "additionalProperties": False}},
    },
    "required": ["title", "rows"],
    "additionalProperties": False,
}  # fmt: skip


class Timed:
    """Seconds of every step, of what a step waits for masks and writes them, and of computing them on their thread."""

    def __init__(self, llm: LLM) -> None:
        worker: Any = llm.client.core.executor.worker  # type: ignore[attr-defined]
        self.steps: list[float] = []
        self.applied: list[float] = []
        self.computed: list[float] = []
        self.batch = 0
        execute, apply, mask = worker.execute, GrammarState.apply, Grammars._mask

        def timed_execute(plan: Any) -> Any:
            start = time.perf_counter()
            result = execute(plan)
            if len(plan.seqs) == self.batch and all(seq.num_scheduled_tokens == 1 for seq in plan.seqs):
                self.steps.append(time.perf_counter() - start)
            return result

        def timed_apply(own: GrammarState, logits: Any, drafts: Any) -> Any:
            start = time.perf_counter()
            result = apply(own, logits, drafts)
            self.applied.append(time.perf_counter() - start)
            return result

        def timed_mask(own: Grammars, entries: Any) -> None:
            start = time.perf_counter()
            mask(own, entries)
            if len(entries) == self.batch:
                self.computed.append(time.perf_counter() - start)

        worker.execute = timed_execute
        GrammarState.apply, Grammars._mask = timed_apply, timed_mask  # type: ignore[method-assign]

    def clear(self) -> None:
        for times in (self.steps, self.applied, self.computed):
            times.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokenizer")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    llm = LLM(args.model, tokenizer=args.tokenizer, num_kv_blocks=512, max_model_len=160)
    timed = Timed(llm)
    timed.batch = args.requests
    form = StructuredOutputsParams(json=SCHEMA)
    kinds = {
        kind: SamplingParams(max_tokens=args.tokens, min_tokens=0 if on else args.tokens, temperature=0.0,
                             structured_outputs=form if on else None)
        for kind, on in (("free", False), ("constrained", True))
    }  # fmt: skip
    llm.generate("x", kinds["constrained"], use_tqdm=False)  # the vocabulary is read here
    medians: dict[str, list[float]] = {"free": [], "constrained": []}
    for _ in range(args.rounds):
        for kind, params in kinds.items():
            timed.clear()
            llm.generate([f"{i} x" for i in range(args.requests)], params, use_tqdm=False)
            medians[kind].append(statistics.median(timed.steps))
            print(
                f"{kind:12s} {len(timed.steps)} steps of {args.requests}, median {medians[kind][-1] * 1e3:.2f} ms"
            )
    free, bound = min(medians["free"]), min(medians["constrained"])
    apply_ms, mask_ms = (
        statistics.mean(timed.applied) * args.requests * 1e3,
        statistics.median(timed.computed) * 1e3,
    )
    print(
        f"masks, beside the model: {mask_ms:.2f} ms per step, {mask_ms / args.requests * 1e3:.0f} us per row"
    )
    print(f"in the step (waiting and writing): {apply_ms:.2f} ms, {apply_ms / bound / 10:.1f} % of it")
    print(f"constrained / free: {bound / free:.3f}")
    llm.close()


if __name__ == "__main__":
    main()
