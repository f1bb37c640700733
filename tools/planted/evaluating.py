"""Planted faults in what `quire eval` says of a model's fidelity."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "kl-reversed",
        "KL is of the model from the original, not of the original from the model",
        "src/quire_lab/eval/figures.py",
        "terms = torch.where(p > 0.0, p * (original - model), 0.0)",
        "terms = torch.where(p > 0.0, model.exp() * (model - original), 0.0)",
        ("tests/eval/test_eval.py::test_kl_is_the_originals_from_the_model",),
    ),
    Mutant(
        "first-half-scored",
        "the first half of a chunk counts as well",
        "src/quire_lab/eval/windows.py",
        "context // 2 + 1)",
        "1)",
        ("tests/eval/test_inputs.py::test_windows_score_what_their_sources_do",),
    ),
    Mutant(
        "scored-twice",
        "tokens that two windows share are scored in both",
        "src/quire_lab/eval/windows.py",
        "first = max(scored, start + 1)",
        "first = start + 1",
        ("tests/eval/test_inputs.py::test_windows_score_what_their_sources_do",),
    ),
    Mutant(
        "row-of-its-own-token",
        "a token is scored by the row that it gives, not by the one before it",
        "src/quire_lab/eval/run.py",
        "rows = slice(start - 1, stop - 1)",
        "rows = slice(min(start, len(hidden) - 1), stop)",
        ("tests/eval/test_eval.py::test_perplexity_of_chunks_is_llama_cpps",),
    ),
    Mutant(
        "original-as-stored",
        "the original is computed from its stored formats",
        "src/quire_lab/eval/run.py",
        "find_model(original_args(engine, other), device, expand=True)",
        "find_model(original_args(engine, other), device)",
        ("tests/eval/test_eval.py::test_a_quantized_file_is_compared_with_its_expansion",),
    ),
    Mutant(
        "norm-by-tokens",
        "acc_norm divides by tokens",
        "src/quire_lab/eval/choices.py",
        "tuple(map(len, task.choices))",
        "tuple(len(w.token_ids) - w.first for w in windows)",
        ("tests/eval/test_eval.py::test_choices_are_counted_by_their_log_likelihoods",),
    ),
)
