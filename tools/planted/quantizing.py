"""Planted faults in what `quire quantize` writes."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "gptq-adds-errors",
        "inputs that follow add to the error of a rounded one instead of making up for it",
        "src/quire_lab/quantize/gptq.py",
        "errors[i - start], alpha=-1.0)",
        "errors[i - start], alpha=1.0)",
        ("tests/quantize/test_methods.py::test_gptq_is_the_closed_form_on_two_inputs",),
    ),
    Mutant(
        "norm-without-one",
        "factors are moved into a norm of Gemma as if it had no 1 added",
        "src/quire_lab/quantize/work.py",
        "one = 1.0 if self.norm_plus_one else 0.0",
        "one = 0.0",
        ("tests/quantize/test_families.py::test_eight_bits_change_little_in_any_family[gemma3-awq]",),
    ),
    Mutant(
        "zero-point-as-it-is",
        "gptq's zero points are written without the 1 that its readers add",
        "src/quire_lab/quantize/layouts.py",
        "pack(zero.t() - 1, bits)",
        "pack(zero.t(), bits)",
        ("tests/quantize/test_calibrated.py::test_other_formats_hold_the_same_numbers",),
    ),
    Mutant(
        "half-under-its-name",
        "the folder has its final name while it is written",
        "src/quire_lab/quantize/folder.py",
        'final.with_name(f"{final.name}.partial")',
        "final",
        ("tests/quantize/test_run.py::test_full_disk_leaves_nothing_under_the_name",),
    ),
    Mutant(
        "hidden-states-of-the-start",
        "a run that goes on calibrates its first layer on embeddings",
        "src/quire_lab/quantize/run.py",
        "calibration.go_on(folder, layer)",
        "pass",
        ("tests/quantize/test_calibrated.py::test_run_that_was_ended_writes_the_same_bytes",),
    ),
    Mutant(
        "kl-is-not-refused",
        "a KL above --max-kl does not stop the folder from getting its name",
        "src/quire_lab/quantize/report.py",
        'not result["kl_mean"] <= args.max_kl',
        'result["kl_mean"] <= -args.max_kl',
        ("tests/quantize/test_calibrated.py::test_kl_is_measured_and_may_refuse",),
    ),
    Mutant(
        "blocks-in-file-order",
        "the rows of q and k lie in a GGUF file as in the checkpoint, not in the pairs that llama.cpp rotates",
        "src/quire_lab/quantize/gguf/output.py",
        "if target.pairwise_heads:",
        "if False:",
        ("tests/quantize/test_gguf.py::test_every_family_computes_as_its_source[llama]",),
    ),
    Mutant(
        "window-is-dropped",
        "a model whose sliding window GGUF cannot say is written without it",
        "src/quire_lab/quantize/gguf/metadata.py",
        "same = ours == theirs",
        "same = ours == theirs or theirs is None",
        ("tests/quantize/test_gguf.py::test_what_gguf_cannot_say_is_refused",),
    ),
    Mutant(
        "high-bits-of-mins",
        "the two upper bits of the last four mins of Q4_K and Q5_K are lost",
        "src/quire_lab/quantize/gguf/blocks.py",
        "mins[:, 4:] >> 4 << 6",
        "mins[:, 4:] >> 6 << 6",
        ("tests/quantize/test_gguf.py::test_gguf_package_decodes_the_numbers_that_were_rounded",),
    ),
    Mutant(
        "offset-of-absmax",
        "nf4's scales are written without the mean that double quantization takes from them",
        "src/quire_lab/quantize/nf4.py",
        "numbers, offset = dynamic_map(), absmax.mean()",
        "numbers, offset = dynamic_map(), absmax.mean() * 0.0",
        ("tests/quantize/test_nf4.py::test_matrix_gets_the_bytes_that_bitsandbytes_writes",),
    ),
    Mutant(
        "rotated-is-anothers",
        "rotated weights lie beside the folder that is written, so that those of another model are taken",
        "src/quire_lab/quantize/run.py",
        'turned = folder.path / f"{given.folder.name}-rotated"',
        'turned = folder.final.with_name("rotated")',
        ("tests/quantize/test_rotate.py::test_rotated_weights_of_one_model_are_not_anothers",),
    ),
)
