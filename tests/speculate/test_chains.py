"""Drafts of one native call: they are those of a step per draft."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.sampling.draft_tree import Drafts
from quire.speculate.proposer import Wanted

pytestmark = pytest.mark.component

PROMPTS = ["It was a dark and", "The cat sat on the mat. The cat sat on", "Once upon a time there was"]


@pytest.mark.parametrize(
    ("method", "dtype"), [("eagle", "auto"), ("eagle", "float32"), ("draft", "auto")], ids=str
)
def test_a_chain_equals_a_step_per_draft(method: str, dtype: str) -> None:
    """Sequences with other prompts, noise and numbers of drafts, over the ends of blocks."""
    llm = LLM(
        "quill", kv_memory="16MiB", max_model_len=128, dtype=dtype, speculate=method, spec_tokens=5,
        max_num_batched_tokens=256,
    )  # fmt: skip
    worker = llm.client.core.executor.worker
    proposer, model = worker.drafting.proposer, worker.drafting.model
    if model.chain is None:
        pytest.skip("there are no native kernels")
    real, chain, counts = proposer.propose, model.chain, set()

    def propose(wanted: list[Wanted]) -> list[Drafts]:
        limits = [max(1, (each.limit + 3 + each.seq_id) % 6) for each in wanted]
        wanted = [each._replace(limit=limit) for each, limit in zip(wanted, limits, strict=True)]
        found = []
        for used in (None, chain):
            model.chain = used
            # What is computed anew has the bits of what was there.
            model.filled[:] = model.written[:] = 0
            found.append(real(wanted))
        assert found[0] == found[1]
        counts.update(map(len, found[0]))
        return found[1]

    proposer.propose = propose
    runs = [0]
    ran = chain.run
    chain.run = lambda chains: (runs.append(len(chains)), ran(chains))[1]
    params = [
        SamplingParams(temperature=0.8 * (i > 0), seed=i, max_tokens=30, ignore_eos=True) for i in range(3)
    ]
    llm.generate(PROMPTS, params)
    accepted = llm.client.core.stats().num_accepted_tokens
    llm.close()
    assert max(runs) == 3, "of several sequences at once"
    assert len(counts) > 2
    assert accepted > 5


def test_processors_and_trees_take_a_step_per_draft() -> None:
    """A draft is sampled behind penalties too, which no native call applies."""
    for settings, params in (
        ({}, SamplingParams(temperature=0.0, max_tokens=12, frequency_penalty=0.5)),
        ({"spec_tree": 3}, SamplingParams(temperature=0.0, max_tokens=12)),
    ):
        llm = LLM("quill", kv_memory="16MiB", max_model_len=128, speculate="eagle", spec_tokens=4, **settings)
        chain = llm.client.core.executor.worker.drafting.model.chain
        if chain is None:
            pytest.skip("there are no native kernels")

        def run(
            chains: list[tuple[int, int, int, int]], real: Any = chain.run, is_tree: bool = bool(settings)
        ) -> list[list[int]]:
            assert is_tree
            assert max(count for *_, count in chains) == 1, "no room for a second draft"
            return real(chains)

        chain.run = run
        llm.generate(PROMPTS, params)
        worker, stats = llm.client.core.executor.worker, llm.client.core.stats()
        assert worker.drafting.proposer is not None, "no draft failed"
        assert stats.num_draft_tokens > 0
        llm.close()
