"""Planted faults in encoders of text: what a row sees, where positions begin, and how rows become a vector."""

from __future__ import annotations

from mutant import Mutant

ATTENTION, POOLED = "src/quire/kernels/encoder/__init__.py", "src/quire/layers/pooled_rows.py"
MODEL, SENTENCES = "src/quire/models/encoder.py", "src/quire/engine/sentences.py"
WINDOWS = ("tests/encoders/test_attention.py",)
FAMILIES = "tests/encoders/test_families.py::"
XLM_ROBERTA, GTE = (
    (f"{FAMILIES}test_vectors_are_those_of_transformers[{kind}]",) for kind in ("xlm_roberta", "gte")
)
WEIGHTED = ("tests/encoders/test_encoder.py::test_pooling_is_what_the_files_say[weightedmean_tokens]",)
MEAN = ("tests/encoders/test_encoder.py::test_vectors_are_those_of_transformers",)

SPARSE = ("tests/encoders/test_sparse.py::test_weights_are_those_of_transformers[bert]",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "padding-seen-by-rows-of-a-text",
        "a row attends to the padding behind its text, and so depends on how long the group is",
        ATTENTION,
        "hidden = (column >= group.lengths[:, None])",
        "hidden = (column > group.lengths[:, None])",
        WINDOWS,
    ),
    Mutant(
        "window-of-an-encoder-one-short",
        "a row does not see the last row of its window",
        ATTENTION,
        "(row[:, None] - column).abs() > window",
        "(row[:, None] - column).abs() >= window",
        WINDOWS,
    ),
    Mutant(
        "columns-of-a-tile-without-its-window",
        "the rows of a tile see nothing of their window behind the tile",
        ATTENTION,
        "min(rows.stop + window, padded)",
        "rows.stop",
        WINDOWS,
    ),
    Mutant(
        "positions-from-the-padding",
        "XLM-RoBERTa's positions begin in the row of the padding",
        MODEL,
        "positions + self.encoder.first_position",
        "positions + max(0, self.encoder.first_position - 1)",
        XLM_ROBERTA,
    ),
    Mutant(
        "mean-of-rows-without-the-last",
        "a mean leaves out the last row",
        POOLED,
        'return wide.sum(0) / (len(wide) if kind == "mean"',
        'return wide[:-1].sum(0) / (len(wide) if kind == "mean"',
        MEAN,
    ),
    Mutant(
        "weights-of-a-mean-from-zero",
        "the first row of a weighted mean weighs nothing",
        POOLED,
        "torch.arange(1, len(wide) + 1, dtype=torch.float32)",
        "torch.arange(0, len(wide), dtype=torch.float32)",
        WEIGHTED,
    ),
    Mutant(
        "keys-of-an-encoder-not-rotated-as-queries",
        "keys have the positions of their heads' neighbours: rotated in pairs of the other kind",
        MODEL,
        "self._rotate(part, *angles[rope], rope.interleaved) for part in (q, k)",
        "self._rotate(part, *angles[rope], rope.interleaved != (part is k)) for part in (q, k)",
        GTE,
    ),
    Mutant(
        "weight-of-a-token-from-the-last-rows",
        "a sparse vector has the weights of a text's last rows alone",
        "src/quire/models/encoder_heads.py",
        "largest if found is None else torch.maximum(found, largest)",
        "largest",
        SPARSE,
    ),
    Mutant(
        "sparse-vector-of-the-means",
        "the weight of a token is that of its mean logit, not of the largest",
        "src/quire/models/encoder_heads.py",
        "largest = logits.amax(0)",
        "largest = logits.mean(0)",
        SPARSE,
    ),
    Mutant(
        "shorter-text-of-a-pair-cut-first",
        "a short query is cut to make room for a long document",
        SENTENCES,
        "if 2 * shorter >= room:",
        "if 2 * shorter >= 0:",
        ("tests/api/test_api_tei.py::test_the_longer_text_of_a_pair_is_cut_first",),
    ),
)
