"""Planted faults in what adapters change beside linears: the ends of a model, DoRA, and copies of the model's own."""

from __future__ import annotations

from mutant import Mutant

ENDS = "tests/lora/test_ends.py::"
LLM = "tests/engine/test_llm_lora.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "end-of-the-last-adapter",
        "a slot that is written anew keeps the embedding of the adapter before",
        "src/quire/layers/end_slots.py",
        "        self._embedding.pop(slot, None)  # gives the memory back before more is taken\n",
        "",
        ("tests/lora/test_exact.py::test_the_traffic_covers_what_it_claims",),
    ),
    Mutant(
        "prompts-scored-by-the-base-model",
        "log-probabilities of a prompt come from the base model's output matrix",
        "src/quire/runner/prompt_outputs.py",
        "self.logits_of(part, span.prompt.adapter_slot)",
        "self.logits_of(part, 0)",
        (f"{LLM}test_adapted_answers_are_those_of_the_merged_model",),
    ),
    Mutant(
        "dora-scales-the-bias",
        "a DoRA scales the bias of its linear too",
        "src/quire/lora/slots.py",
        "offset=None if bias is None else (1.0 - gain) * bias",
        "offset=None",
        (f"{ENDS}test_dora_is_that_of_merged_weights",),
    ),
    Mutant(
        "dora-norm-of-the-base",
        "the norm of a DoRA is that of the model's weights without the adapter",
        "src/quire/lora/slots.py",
        "rows_of(ids) + low.scale * (low.b[ids] @ low.a)",
        "rows_of(ids)",
        (f"{ENDS}test_dora_is_that_of_merged_weights",),
    ),
    Mutant(
        "another-models-copy",
        "an adapter whose copy of an end is another model's is served",
        "src/quire/lora/base_copies.py",
        "elif not _same(copy, own):",
        "elif copy.shape != own.shape:",
        (f"{LLM}test_a_copy_of_another_model_is_rejected",),
    ),
    Mutant(
        "gates-adapted-as-queries",
        "an adapter of queries that alternate with their gates changes the first rows of both",
        "src/quire/lora/adapter.py",
        "    return take.pieces or (range",
        "    return (range",
        ("tests/lora/test_adapter.py", "tests/lora/test_parity.py::test_against_merged_weights[qwen3_5]"),
    ),
)
