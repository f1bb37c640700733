"""Trees of Medusa's choices: their shape, their tokens, and answers that equal those without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.speculate import heads

from quire import LLM, SamplingParams
from quire.runner.heads import MedusaModel
from quire.sampling.draft_tree import ROOT, Drafts
from quire.speculate.medusa import Node, planted, shape_of

PROMPTS = ["It was a dark and", "The cat sat on the mat. The cat sat on", "Once upon a time"]


def engine(**settings: object) -> LLM:
    return LLM("quill", kv_memory="16MiB", max_model_len=128, **settings)


@pytest.mark.parametrize("limit", [1, 3, 5, 12])
@pytest.mark.parametrize("max_paths", [1, 2, 4])
def test_a_tree_holds_each_choice_once(limit: int, max_paths: int) -> None:
    nodes = shape_of(3, limit, max_paths)
    assert len(nodes) == limit or len(nodes) > 2 * max_paths
    assert len(set(nodes)) == len(nodes) <= limit
    for place, node in enumerate(nodes):
        assert node.parent < place
        assert node.head == (0 if node.parent == ROOT else nodes[node.parent].head + 1) < 3
        assert not node.rank or node._replace(rank=node.rank - 1) in nodes[:place], (
            "the likelier one comes first"
        )
    choices = [[100 * head + rank for rank in range(9)] for head in range(3)]
    drafts, kept = planted(nodes, choices)
    assert kept == list(nodes)
    assert len(drafts.paths()) <= max_paths
    assert drafts.trunk().token_ids == tuple(100 * head for head in range(min(3, len(drafts.trunk()))))


def test_a_choice_that_is_missing_takes_those_behind_it_along() -> None:
    nodes = (Node(0, 0, ROOT), Node(0, 1, ROOT), Node(1, 0, 1), Node(1, 0, 0), Node(1, 1, 0))
    drafts, kept = planted(nodes, [[7], [8, 9]])
    assert drafts == Drafts((7, 8, 9), (ROOT, 0, 0))
    assert kept == [nodes[0], nodes[3], nodes[4]]
    assert planted(nodes, [[], [8, 9]]) == (Drafts(), [])


def test_a_trees_tokens_are_the_largest_logits_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = MedusaModel.sample, 0

    def sample(self: MedusaModel, seq_ids: list[int], trees: list[tuple[Node, ...]]) -> list[Drafts]:
        nonlocal seen
        found = real(self, seq_ids, trees)
        seqs = [self.worker_seqs.find(seq_id) for seq_id in seq_ids]
        with torch.inference_mode():
            best = self._heads.logits(self._last(seqs), 3).view(len(seqs), 3, -1).topk(4).indices.tolist()
        for of_seq, tree, drafts in zip(best, trees, found, strict=True):
            assert list(drafts.token_ids) == [of_seq[node.head][node.rank] for node in tree]
            assert drafts.parents == tuple(node.parent for node in tree)
            seen += not drafts.is_chain
        return found

    monkeypatch.setattr(MedusaModel, "sample", sample)
    llm = engine(speculate="medusa", spec_tokens=6, spec_tree=3)
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    llm.close()
    assert seen > 5


@pytest.mark.parametrize("own", [True, False])
def test_trees_of_heads_do_not_change_answers(own: bool, tmp_path: Path) -> None:
    """With penalties, log-probabilities and few ids, of which there are fewer than the tree has choices."""
    params = [
        SamplingParams(temperature=0.0, seed=1, max_tokens=20, frequency_penalty=0.5, logprobs=2),
        SamplingParams(temperature=0.9, seed=2, max_tokens=20, n=2),
        SamplingParams(temperature=1.0, seed=3, max_tokens=20, allowed_token_ids=[300, 301]),
    ]
    settings = {} if own else {"draft_model": str(tmp_path)}
    heads.write(tmp_path, *heads.medusa(384, 4096, blocks=2, vllm=True, own=False))
    answers = []
    for each in ({}, {"speculate": "medusa", "spec_tokens": 8, "spec_tree": 4, **settings}):
        llm = engine(**each, max_num_batched_tokens=32)
        found = [llm.generate(PROMPTS, one) for one in params]
        answers.append([[(o.token_ids, o.logprobs) for a in some for o in a.outputs] for some in found])
        stats = llm.client.core.stats()
        llm.close()
    assert answers[0] == answers[1]
    assert stats.num_draft_tokens > 3 * stats.num_verifications, "they are trees"
    assert not own or stats.num_accepted_tokens > 10
