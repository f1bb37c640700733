"""Every weight is on the ranks that need it, whole or cut, and nothing is cut through a quantization group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.exact.models import MODELS
from tests.runner.tiny import SPECS

from quire.errors import ConfigError
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, weight_shapes
from quire.parallel.shard import Cut, Shard, shard
from quire.parallel.topology import Topology
from quire.recurrent_spec import RecurrentSpec
from quire.rope_spec import RopeSpec
from quire.weight_format import WeightFormat

MODEL_SPECS: Mapping[str, ModelSpec] = {
    **{f"exact-{name}": make() for name, make in MODELS.items()},
    **{f"runner-{name}": spec for name, spec in SPECS.items()},
}
ADDED_ONCE = ("attn.o.bias", "mlp.down.bias", "moe.down.bias")


def shards(spec: ModelSpec, topology: Topology) -> list[Shard]:
    return [shard(spec, topology, rank) for rank in range(topology.world_size)]


def elements(cut: Cut, shape: tuple[int, ...]) -> set[tuple[int, ...]]:
    parts = (part or range(size) for part, size in zip(cut.ranges(len(shape)), shape, strict=True))
    return set(itertools.product(*parts))


@pytest.mark.parametrize("name", MODEL_SPECS)
@pytest.mark.parametrize(
    "topology", [Topology(2), Topology(3), Topology(pp=2), Topology(ep=2), Topology(2, 2)], ids=str
)
def test_the_ranks_have_every_weight(name: str, topology: Topology) -> None:
    spec = MODEL_SPECS[name]
    whole = weight_shapes(spec)
    found: dict[str, set[tuple[int, ...]]] = {each: set() for each in whole}
    for part in shards(spec, topology):
        for local, cut in part.cuts.items():
            assert part.shapes[local] == cut.shape(whole[cut.name])
            found[cut.name] |= elements(cut, whole[cut.name])
    for each, shape in whole.items():
        assert found[each] == elements(Cut(each), shape), each


@pytest.mark.parametrize("name", MODEL_SPECS)
def test_shapes_are_those_of_the_ranks_spec(name: str) -> None:
    """A rank's layers are an ordinary model: smaller, with biases that are added once on the first rank alone."""
    for rank, part in enumerate(shards(MODEL_SPECS[name], Topology(2))):
        expected = weight_shapes(part.spec)
        for local, shape in part.shapes.items():
            if local.startswith("layers."):
                assert shape == expected[local], local
        missing = {each for each in expected if each not in part.shapes}
        assert all(each.endswith(ADDED_ONCE) and rank > 0 for each in missing), missing


def test_one_rank_has_the_whole_model() -> None:
    for spec in MODEL_SPECS.values():
        part = shard(spec, Topology(), 0)
        assert part.spec == spec
        assert part.shapes == weight_shapes(spec)
        assert all(cut == Cut(name) for name, cut in part.cuts.items())


def test_a_norm_over_all_heads_keeps_attention_whole() -> None:
    attention = AttentionSpec(4, 4, 8, 8, 1.0, RopeSpec(1e4, 8), o_bias=True, qk_norm="full")
    spec = ModelSpec("olmo2", "O", 64, 32, (LayerSpec(attention, MlpSpec(64), "post"),), 1e-5, 64)
    part = shard(spec, Topology(2), 1)
    assert part.spec.layers[0].attention == attention
    assert part.cuts["layers.0.attn.o.bias"] == Cut("layers.0.attn.o.bias")
    assert part.cuts["layers.0.mlp.down.weight"].columns == range(32, 64)


@pytest.mark.parametrize("topology", [Topology(2), Topology(ep=2), Topology(4)])
def test_a_recurrent_layer_is_cut_by_value_heads(topology: Topology) -> None:
    r = RecurrentSpec("gated_delta", 2, 8, 4, 8, conv_kernel=4, conv_channels=80)
    spec = ModelSpec("qwen3_5", "Q", 64, 64, (LayerSpec(None, MlpSpec(256), recurrent=r),), 1e-5, 64)
    of_values, of_keys = [], set()
    for rank in range(topology.world_size):
        part = shard(spec, topology, rank)
        own = part.spec.layers[0].recurrent
        assert own is not None
        assert part.shapes["layers.0.delta.v.weight"] == (own.v_width, 64)
        assert part.shapes["layers.0.delta.conv_k.weight"] == (own.k_width, 4)
        values, keys = part.cuts["layers.0.delta.rate"].rows, part.cuts["layers.0.delta.k.weight"].rows
        assert values is not None
        assert keys is not None
        of_values += list(values)
        of_keys |= set(keys)
        first, last = values.start // 4, (values.stop - 1) // 4  # 4 value heads per key head
        assert keys == range(first * 4, (last + 1) * 4)  # a key head has 4 rows
    assert of_values == list(range(8))
    assert of_keys == set(range(8))


def plain(num_heads: int, head_dim: int, inter: int) -> ModelSpec:
    attention = AttentionSpec(num_heads, num_heads, head_dim, head_dim, 1.0, RopeSpec(1e4, head_dim))
    return ModelSpec("llama", "L", 100, 64, (LayerSpec(attention, MlpSpec(inter)),), 1e-5, 64)


@pytest.mark.parametrize("group", [16, 32, 128])
def test_groups_stay_whole(group: int) -> None:
    spec, held = plain(6, 64, 384), WeightFormat("int4", group)
    formats = {name: held for name in weight_shapes(spec) if name.endswith(("o.weight", "down.weight"))}
    for rank in range(2):
        part = shard(spec, Topology(2), rank, formats)
        for name in ("layers.0.attn.o.weight", "layers.0.mlp.down.weight"):
            columns = part.cuts[name].columns
            assert columns is not None
            assert columns.start % group == 0
            assert columns.stop % group == 0
        assert part.formats(formats).keys() == formats.keys()


def test_shares_of_memory_add_up() -> None:
    spec = plain(8, 16, 4096)
    total = spec.weight_bytes()
    parts = [part.weight_bytes("bfloat16") for part in shards(spec, Topology(2))]
    norms = 3 * 64 * 2
    assert sum(parts) == total + norms  # both ranks have the norms
    assert abs(parts[0] - parts[1]) <= 64 * 64 * 2 * 3


def test_the_cache_has_the_ranks_heads_and_layers() -> None:
    spec = MODELS["sliding"]()
    layout = spec.kv_layout(320)
    half = shard(spec, Topology(2), 1).kv_layout(layout)
    assert [(g.layers, g.window) for g in half.groups] == [(g.layers, g.window) for g in layout.groups]
    assert half.groups[0].bytes_per_token("bfloat16") * 2 == layout.groups[0].bytes_per_token("bfloat16")
    stage = shard(spec, Topology(pp=2), 1).kv_layout(layout)
    assert [group.window for group in stage.groups] == [group.window for group in layout.groups]
    assert sorted(layer for group in stage.groups for layer in group.layers) == [0]


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (Topology(pp=3), "pipeline_parallel_size = 3: the model has 2 layers; at most 2 is allowed"),
        (Topology(tp=5), "tensor_parallel_size = 5: the model has 4 attention heads over 2 KV heads"),
    ],
    ids=str,
)
def test_more_ranks_than_parts_are_refused(topology: Topology, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard(MODELS["llama"](), topology, topology.world_size - 1)


def test_an_mlp_too_narrow_for_its_groups_is_refused() -> None:
    spec = plain(8, 128, 256)
    formats = {"layers.0.mlp.down.weight": WeightFormat("int4", 128)}
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size = 3: .*down.weight has 256 inputs in groups of 128"
    ):
        shard(replace(spec), Topology(3), 0, formats)


def test_the_last_mlp_counts_as_decoding_alone() -> None:
    """Of three equal layers, the second stage has two: a prompt's last MLP is computed for its last token alone."""
    spec = SPECS[
        next(name for name, each in SPECS.items() if not any(layer.mlp.moe for layer in each.layers))
    ]
    layer = spec.layers[0]
    wide = replace(layer, mlp=replace(layer.mlp, intermediate_size=64 * spec.hidden_size))
    three = replace(spec, layers=(wide,) * 3, vocab_size=8)
    assert [len(each.layers) for each in shards(three, Topology(pp=2))] == [1, 2]
