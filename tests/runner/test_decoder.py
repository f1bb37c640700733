"""The decoder against a plain fp64 Llama over contiguous keys; loading."""

from __future__ import annotations

import pytest
import torch
from tests.runner.tiny import MAX_LEN, SPECS, Driver, engine_config, llama, prompt_of, weights

from quire.errors import ModelLoadError
from quire.kernels import registry
from quire.models.decoder import Decoder


def plain_llama(ids: list[int]) -> torch.Tensor:
    """Logits ``[len(ids), vocab]`` of the tiny Llama in fp64, straight from the definition."""
    spec, w = llama(), {name: tensor.double() for name, tensor in weights(llama())}
    a = spec.layers[0].attention
    positions = torch.arange(len(ids), dtype=torch.float64)
    angles = positions[:, None] / (1e4 ** (torch.arange(0, a.head_dim, 2, dtype=torch.float64) / a.head_dim))
    cos, sin = (torch.cat((f(angles), f(angles)), -1)[:, None] for f in (torch.cos, torch.sin))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt() * w[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    x = w["embed.weight"][ids]
    for index in range(spec.num_layers):
        p = f"layers.{index}."
        h = norm(x, p + "attn_norm.weight")
        q, k, v = ((h @ w[p + f"attn.{n}.weight"].T).view(len(ids), -1, a.head_dim) for n in ("q", "k", "v"))
        q, k = rotate(q), rotate(k).repeat_interleave(2, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * a.scale
        scores.masked_fill_(torch.ones(len(ids), len(ids)).triu(1).bool(), float("-inf"))
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
        x = x + out.flatten(1) @ w[p + "attn.o.weight"].T
        h = norm(x, p + "mlp_norm.weight")
        gate, up = h @ w[p + "mlp.gate.weight"].T, h @ w[p + "mlp.up.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[p + "mlp.down.weight"].T
    return norm(x, "norm.weight") @ w["lm_head.weight"].T


def test_paged_equals_contiguous() -> None:
    driver = Driver(engine_config(SPECS["llama"]), shuffle=True)
    known = driver.add(0, prompt_of(100))
    driver.generate(0, 8, chunk=13)
    oracle = plain_llama([*known.prompt, *known.output])
    for (_, position), row in driver.logits.items():
        error = (row.double() - oracle[position]).abs().max() / oracle[position].abs().max()
        assert error < 5e-5, f"position {position}: {error}"
        assert int(row.argmax()) == int(oracle[position].argmax())


def make(name: str) -> Decoder:
    spec = SPECS[name]
    return Decoder(spec, spec.kv_layout(MAX_LEN), MAX_LEN, torch.float32, registry.choose())


@pytest.mark.parametrize("name", SPECS)
def test_every_weight_has_a_place_and_matters(name: str) -> None:
    """Without any one tensor the load fails and names it."""
    stream = weights(SPECS[name])
    for index in range(0, len(stream), 5):
        with pytest.raises(ModelLoadError, match=stream[index][0]):
            make(name).load(stream[:index] + stream[index + 1 :])


def test_wrong_shape_and_unknown_name_are_named() -> None:
    stream = weights(SPECS["llama"])
    with pytest.raises(ModelLoadError, match=r"norm\.weight has shape \[3\].*\[48\]"):
        make("llama").load([("norm.weight", torch.zeros(3))])
    with pytest.raises(ModelLoadError, match="nonsense"):
        make("llama").load([*stream, ("nonsense", torch.zeros(3))])
