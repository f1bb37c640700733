"""What the encoder of a model that sees takes of memory, and where it runs."""

from __future__ import annotations

from math import prod

from quire.config import DeviceInfo
from quire.errors import ConfigError
from quire.families.vision import encoder_shapes
from quire.images.limits import LIMITS
from quire.modelspec import DTYPE_BYTES
from quire.parallel.topology import Topology
from quire.vision_spec import VisionSpec


def vision_bytes(vision: VisionSpec, dtype: str, device: DeviceInfo, topology: Topology) -> int:
    """Return the bytes of the encoder's weights, and of what is kept of its output.

    Raises:
        ConfigError: the engine runs on a GPU, or on several ranks.
    """
    if device.kind != "cpu":
        raise ConfigError(
            f"the model takes images, and its encoder runs on a CPU alone, not on {device.name}: choose --device cpu, "
            "or serve its text decoder"
        )
    if topology.world_size > 1:
        raise ConfigError(
            f"the model takes images, and its encoder runs on one rank, not on {topology.world_size}: leave the sizes "
            "of the parallel axes at 1"
        )
    size = DTYPE_BYTES[dtype]
    return LIMITS.encoded_bytes + size * sum(map(prod, encoder_shapes(vision).values()))
