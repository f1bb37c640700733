"""What the encoder of a model that sees takes of memory and of a step, and where it runs."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from quire.args import EngineArgs
from quire.config import DeviceInfo
from quire.errors import ConfigError
from quire.families.vision import encoder_shapes
from quire.images.limits import LIMITS
from quire.modelspec import DTYPE_BYTES, ModelSpec
from quire.parallel.topology import Topology


def fit_vision(
    args: EngineArgs, spec: ModelSpec, dtype: str, device: DeviceInfo, topology: Topology
) -> tuple[ModelSpec, int, tuple[str, ...]]:
    """Return ``spec``, the bytes of its encoder and of what is kept of its output, and what is to be said of it.

    Where the encoder does not run, its text decoder does: images are then refused by name.

    Raises:
        ConfigError: an image fits no step.
    """
    vision = spec.vision
    assert vision is not None
    if device.kind != "cpu" or topology.world_size > 1:
        where = f"on {device.name}" if device.kind != "cpu" else f"on {topology.world_size} ranks"
        remark = (
            f"the text decoder alone is served, and images are refused: the encoder runs on a CPU with one rank, and "
            f"this is {where}"
        )
        return replace(spec, vision=None), 0, (remark,)
    longest = vision.num_tokens((vision.image_size, vision.image_size)) if vision.both_ways else 0
    if longest and args.max_num_batched_tokens < longest + args.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens = {args.max_num_batched_tokens} is too small: the {longest} tokens of an image "
            f"see each other both ways, so they are computed in one step, next to one token per seat (max_num_seqs = "
            f"{args.max_num_seqs}). Set it to {longest + args.max_num_seqs} or more",
            param="max_num_batched_tokens",
        )
    size = DTYPE_BYTES[dtype]
    return spec, LIMITS.encoded_bytes + size * sum(map(prod, encoder_shapes(vision).values())), ()
