"""Formats that are not read: the error says what each is, why not, and what to take; docs have the same table."""

from __future__ import annotations

import pytest
from tools.house import ROOT

from quire.errors import UnsupportedModelError
from quire.families import SUPPORTED, spec_from_config
from quire.families.missing import NEEDS, reason
from quire.families.quantization import METHODS, read_quantization
from quire.families.refused_formats import REFUSED
from quire.families.shape import Fields


@pytest.mark.parametrize("method", REFUSED)
def test_a_refused_format_is_explained(method: str) -> None:
    fields = Fields({"quantization_config": {"quant_method": method, "load_in_4bit": True}})
    with pytest.raises(UnsupportedModelError) as error:
        read_quantization(fields)
    text, refused = str(error.value), REFUSED[method]
    assert f"quantized by {method!r}" in text
    assert (
        f"{refused.name} is {refused.what}; it is not read because {refused.why}. Take {refused.instead}."
        in text
    )
    assert all(each in text for each in METHODS)


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"quantized by 'brand-new' .* Supported are compressed-tensors"
    ):
        read_quantization(Fields({"quantization_config": {"quant_method": "brand-new"}}))


def test_no_format_is_both_read_and_refused() -> None:
    assert not set(METHODS) & set(REFUSED)


def test_docs_have_the_same_table() -> None:
    page = (ROOT / "docs/quantization.md").read_text()
    section = page.partition("### What is not read")[2].partition("\n## ")[0]
    rows = [
        tuple(cell.strip() for cell in line.split("|")[1:-1])
        for line in section.splitlines()
        if line[:2] == "| "
    ]
    assert rows[2:] == [tuple(refused) for refused in REFUSED.values()]


@pytest.mark.parametrize(
    ("architecture", "needs"),
    [
        ("Llama4ForCausalLM", "It needs attention in chunks, and experts scaled before their projection."),
        ("DeepseekV32ForCausalLM", "It needs an indexer that picks tokens before attention."),
    ],
)
def test_architecture_is_refused_with_what_it_needs(architecture: str, needs: str) -> None:
    with pytest.raises(UnsupportedModelError, match=architecture) as error:
        spec_from_config({"architectures": [architecture]})
    assert needs in str(error.value)
    assert "Supported are LlamaForCausalLM" in str(error.value)


def test_no_architecture_that_runs_is_said_to_need_something() -> None:
    assert not NEEDS.keys() & set(SUPPORTED)
    assert reason(["LlamaForCausalLM", None]) == ""


def test_quip_is_known_without_a_quantization_config() -> None:
    with pytest.raises(UnsupportedModelError, match=r"QuIP# is vectors of the E8 lattice.*Take a GGUF file"):
        read_quantization(Fields({"quip_params": {"codebook": "E8P12"}}))


def test_sparse_weights_name_the_dense_checkpoint() -> None:
    config = {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}}
    with pytest.raises(UnsupportedModelError, match=r"sparse-24-bitmask.*take the dense checkpoint"):
        read_quantization(Fields({"quantization_config": config}))
