"""A linear of several matrices of the checkpoint, and the two ends of a model, whatever their formats."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import registry
from quire.layers.linear import Embedding, Linear
from quire.layers.norm import RmsNorm
from quire.layers.weights import Build
from quire.weight_format import PLAIN, WeightFormat

INT8, INT4 = WeightFormat("int8"), WeightFormat("int4", 32)
PARTS = {"q": 24, "k": 8, "v": 8}
FORMATS = [
    {},
    {"q.weight": INT8, "k.weight": INT8, "v.weight": INT8},
    {"q.weight": INT4, "k.weight": INT4, "v.weight": INT8},
    {"k.weight": INT8},
]


def build_of(formats: dict[str, WeightFormat]) -> Build:
    return Build(torch.bfloat16, registry.choose(), 1e-6, formats=formats)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("formats", FORMATS, ids=["plain", "one format", "v differs", "k differs"])
def test_parts_together_are_the_parts_alone(formats: dict[str, WeightFormat]) -> None:
    weights = {name: random(size, 64, seed=i) for i, (name, size) in enumerate(PARTS.items())}
    biases = {name: random(size, seed=9 + i).float() for i, (name, size) in enumerate(PARTS.items())}

    def made(parts: dict[str, int]) -> Linear:
        linear = Linear(parts, 64, build_of(formats), bias=True)
        for name, load in linear.weight_loaders().items():
            part, _, kind = name.partition(".")
            load(weights[part] if kind == "weight" else biases[part])
        return linear

    x, fused = random(5, 64, seed=20), made(PARTS)
    alone = torch.cat([made({name: size})(x) for name, size in PARTS.items()], dim=1)
    assert torch.equal(fused(x), alone)
    num_formats = len({formats.get(f"{name}.weight", PLAIN) for name in PARTS})
    assert (fused.reads != PLAIN) is (num_formats == 1 and bool(formats)), "rows of one format for one matrix"
    bias = fused.bias_of("v")
    assert bias is not None
    assert torch.equal(bias, biases["v"])


@pytest.mark.parametrize("held", [PLAIN, INT8], ids=str)
def test_a_tied_embedding_is_the_output_matrix(held: WeightFormat) -> None:
    ids, hidden, table = torch.tensor([3, 0, 3]), random(2, 64, seed=2), random(40, 64)

    def made(tied: bool) -> Embedding:
        formats = {} if held == PLAIN else {"embed.weight": held, "lm_head.weight": held}
        ends = Embedding(40, 64, build_of(formats), tied=tied, scale=1.0)
        loaders = ends.weight_loaders()
        assert loaders.keys() == ({"embed.weight"} if tied else {"embed.weight", "lm_head.weight"})
        for load in loaders.values():
            load(table)
        return ends

    tied, apart = made(True), made(False)
    assert torch.equal(tied(ids), apart(ids))
    assert torch.equal(tied.logits(hidden), apart.logits(hidden))
    assert tied.logits(hidden).dtype == torch.float32
    if held == PLAIN:
        assert torch.equal(tied(ids), table[ids])


def test_the_scale_of_an_embedding_is_rounded_first() -> None:
    ends = Embedding(4, 64, build_of({}), tied=True, scale=5.6789)
    ends.weight_loaders()["embed.weight"](random(4, 64))
    scale = torch.tensor(5.6789, dtype=torch.bfloat16)
    assert torch.equal(ends(torch.tensor([1])), random(4, 64)[1:2] * scale)


def test_gemmas_norm_adds_one_to_its_weight() -> None:
    plain, shifted = (RmsNorm(64, build_of({}), plus_one=plus_one) for plus_one in (False, True))
    weight = random(64).float()
    plain.load(weight + 1.0)
    shifted.load(weight)
    assert torch.equal(plain(random(3, 64)), shifted(random(3, 64)))
