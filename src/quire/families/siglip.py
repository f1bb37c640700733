"""The tensors of SigLIP (arXiv:2303.15343), the encoder of several models that see, under the names of its files."""

from __future__ import annotations

from quire.vision_spec import VisionSpec


def siglip_shapes(spec: VisionSpec, prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by its name behind ``prefix``."""
    hidden, inter, patch = spec.hidden_size, spec.intermediate_size, spec.patch_size
    layer: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in {
        **{f"self_attn.{n}": (hidden, hidden) for n in ("q_proj", "k_proj", "v_proj", "out_proj")},
        "mlp.fc1": (inter, hidden),
        "mlp.fc2": (hidden, inter),
    }.items():
        layer |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name in ("layer_norm1", "layer_norm2"):
        layer |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    encoder: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (hidden, 3, patch, patch),
        "embeddings.patch_embedding.bias": (hidden,),
        "embeddings.position_embedding.weight": ((spec.image_size // spec.patch_size) ** 2, hidden),
        "post_layernorm.weight": (hidden,),
        "post_layernorm.bias": (hidden,),
    }
    for index in range(spec.num_layers):
        encoder |= {f"encoder.layers.{index}.{name}": shape for name, shape in layer.items()}
    return {prefix + name: shape for name, shape in encoder.items()}
