"""Shapes, bytes and groups against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, weight_shapes
from quire.recurrent_spec import RecurrentSpec
from quire.rope_spec import RopeSpec


def attention(heads: int, kv_heads: int, dim: int, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, dim, dim**-0.5, RopeSpec(10000.0, dim), window=window)


def model(layers: tuple[LayerSpec, ...], hidden: int, vocab: int, tied: bool = False) -> ModelSpec:
    return ModelSpec("llama", "LlamaForCausalLM", vocab, hidden, layers, 1e-5, 8192, tie_word_embeddings=tied)


LLAMA_70B = model((LayerSpec(attention(64, 8, 128), MlpSpec(28672)),) * 80, 8192, 128256)
LLAMA_1B = model((LayerSpec(attention(32, 8, 64), MlpSpec(8192)),) * 16, 2048, 128256, tied=True)


def test_parameters_of_published_models() -> None:
    assert LLAMA_70B.num_params == 70_553_706_496  # Llama-3-70B
    assert LLAMA_1B.num_params == 1_235_814_400  # Llama-3.2-1B


def test_kv_bytes_of_llama_3_70b() -> None:
    layout = LLAMA_70B.kv_layout(8192)
    (group,) = layout.groups
    assert LLAMA_70B.kv_bytes_per_token(group) == 2 * 80 * 8 * 128 * 2
    assert LLAMA_70B.kv_bytes_per_token(group) * 4096 == 1.25 * 2**30
    assert layout.block_bytes(16, "bfloat16") == 16 * LLAMA_70B.kv_bytes_per_token(group)


def test_only_the_chosen_experts_are_active() -> None:
    moe = MoeSpec(num_experts=8, top_k=2, intermediate_size=64)
    spec = model((LayerSpec(attention(4, 2, 16), MlpSpec(0, moe=moe)),), 64, 100)
    experts = 8 * 3 * 64 * 64
    dense = spec.num_params - experts - 3 * 64 - 100 * 64  # norms and the embedding look-up do not multiply
    assert spec.num_active_params == dense + experts // 4


@pytest.mark.parametrize(
    ("pattern", "groups", "per_page"),
    [
        ("FFFF", [((0, 1, 2, 3), None)], 4),
        ("SFSF", [((1, 3), None), ((0, 2), 64)], 2),
        ("SSF", [((2,), None), ((0,), 64), ((1,), 64)], 1),  # one full layer to two of a window
        ("SSSSSFSSSS", [((5,), None), *(((i,), 64) for i in (0, 1, 2, 3, 4, 6, 7, 8, 9))], 1),
        ("SSSSSFFFF", [((5, 6, 7, 8), None), ((0, 1), 64), ((2, 3, 4), 64)], 4),
    ],
)
def test_layers_form_groups_of_equal_pages(
    pattern: str, groups: list[tuple[tuple[int, ...], int | None]], per_page: int
) -> None:
    layers = tuple(LayerSpec(attention(4, 2, 16, 64 if c == "S" else None), MlpSpec(64)) for c in pattern)
    layout = model(layers, 64, 100).kv_layout(1024)
    assert [(group.layers, group.window) for group in layout.groups] == groups
    assert layout.layers_per_block == per_page
    for group, spec in enumerate(layout.groups):
        for slot, layer in enumerate(spec.layers):
            assert layout.group_of_layer(layer) == (group, slot)


def test_layers_of_several_shapes_share_blocks_of_one_size() -> None:
    """Gemma 4 E2B and 31B: global layers have wider heads; each class fills the blocks with layers of its own."""
    local, full = attention(8, 1, 256, 512), attention(8, 1, 512)
    reads = replace(local, kv_layer=13)
    layers = [LayerSpec(full if i % 5 == 4 else local, MlpSpec(64)) for i in range(15)]
    spec = model((*layers, *(LayerSpec(reads, MlpSpec(64)) for _ in range(20))), 1536, 100)
    layout = spec.kv_layout(8192)
    assert [group.layers for group in layout.groups] == [
        (4, 9, 14),
        (0, 1, 2, 3, 5, 6),
        (7, 8, 10, 11, 12, 13),
    ]
    assert layout.block_bytes(16, "bfloat16") == 16 * 3 * 1024 * 2  # no padding
    assert layout.block_bytes(16, "int8") == 16 * (6 * (512 + 8))
    assert spec.kv_source(20) == 13
    large = [
        LayerSpec(attention(32, 4, 512) if i % 6 == 5 else attention(32, 16, 256, 1024), MlpSpec(64))
        for i in range(60)
    ]
    layout = model(tuple(large), 64, 100).kv_layout(8192)
    assert [len(group.layers) for group in layout.groups] == [10] + [5] * 10
    assert layout.block_bytes(1, "bfloat16") == 10 * 4096 * 2


RECURRENT = RecurrentSpec("gated_delta", 2, 6, 8, 16, conv_kernel=4, conv_channels=128)


def hybrid(pattern: str) -> ModelSpec:
    layers = {
        "R": LayerSpec(None, MlpSpec(64), recurrent=RECURRENT),
        "F": LayerSpec(attention(4, 2, 16), MlpSpec(64)),
    }
    return model(tuple(layers[kind] for kind in pattern), 64, 100)


def test_only_layers_that_attend_have_keys_and_values() -> None:
    spec = hybrid("RRRFRRRF")
    layout = spec.kv_layout(1024)
    assert [(group.layers, group.window) for group in layout.groups] == [((3, 7), None)]
    assert layout.layers_per_block == 2
    assert spec.draft_layout().groups == layout.groups
    assert spec.kv_bytes_per_token(layout.groups[0]) == 2 * 2 * 2 * 16 * 2


def test_states_are_counted_per_sequence() -> None:
    spec = hybrid("RRRFRRRF")
    assert spec.state_layers == (0, 1, 2, 4, 5, 6)
    assert spec.state_bytes_per_sequence == 6 * 4 * (6 * 8 * 16 + 128 * 3)
    assert hybrid("FF").state_layers == ()


def test_a_recurrent_layer_has_weights_of_its_own() -> None:
    shapes = {name: shape for name, shape in weight_shapes(hybrid("R")).items() if ".delta." in name}
    assert shapes["layers.0.delta.q.weight"] == (16, 64)
    assert shapes["layers.0.delta.v.weight"] == shapes["layers.0.delta.z.weight"] == (96, 64)
    assert shapes["layers.0.delta.conv_v.weight"] == (96, 4)
    assert shapes["layers.0.delta.rate"] == (6,)
    assert shapes["layers.0.delta.o.weight"] == (64, 96)


def test_a_window_that_is_never_full_is_full_attention() -> None:
    layers = tuple(LayerSpec(attention(4, 2, 16, w), MlpSpec(64)) for w in (64, None))
    assert len(model(layers, 64, 100).kv_layout(64).groups) == 1
    assert len(model(layers, 64, 100).kv_layout(65).groups) == 2


def test_every_parameter_has_one_name_and_shape() -> None:
    shapes = weight_shapes(replace(LLAMA_1B, layers=LLAMA_1B.layers[:1]))
    assert shapes["layers.0.attn.q.weight"] == (2048, 2048)
    assert shapes["layers.0.attn.k.weight"] == (512, 2048)
    assert shapes["layers.0.mlp.down.weight"] == (2048, 8192)
    assert "lm_head.weight" not in shapes  # tied
