"""How the settings cut a model over ranks, and where the ranks run."""

from __future__ import annotations

from quire.args import EngineArgs
from quire.config import DeviceInfo, RayConfig
from quire.errors import ConfigError
from quire.parallel.topology import Topology


def topology_of(args: EngineArgs, device: DeviceInfo, *, has_heads: bool = False) -> Topology:
    """Return how the model is cut over ranks. ``has_heads``: drafts come from heads on the model.

    Raises:
        ConfigError: this machine or the executor cannot run so many.
    """
    tp = device.num_nodes if args.tensor_parallel_size == "auto" else args.tensor_parallel_size
    if not str(tp).isdecimal():
        raise ConfigError(f"tensor_parallel_size = {tp!r} must be 'auto' or a number of at least 1")
    topology = Topology(tp=int(tp), pp=args.pipeline_parallel_size)
    world = topology.world_size
    if args.executor != "ray" and (args.nodes is not None or args.ray_address is not None):
        raise ConfigError("nodes and ray_address need executor = 'ray'")
    if world == 1:
        return topology
    if has_heads:
        raise ConfigError(
            f"{topology}: heads that draft (Medusa, EAGLE) run on one rank only: leave them out"
        )
    if args.lora or args.max_loras:
        raise ConfigError(
            f"{topology}: adapters (lora, max_loras) run on one rank only: leave one of them out"
        )
    if args.executor == "local":
        raise ConfigError(
            f"executor = 'local' is one process, and {topology} makes {world} ranks: leave it out"
        )
    if device.kind != "cpu":
        raise ConfigError(
            f"{topology} needs {world} devices, and one rank runs on {device.name}: device = 'cpu' cuts the model over "
            "processes of this machine"
        )
    if world > device.num_cores * (args.nodes or 1) and args.threads is None:
        raise ConfigError(
            f"{topology} makes {world} ranks, and there are {device.num_cores} cores: give fewer, or threads = 1 to "
            "let ranks share a core"
        )
    return topology


def ray_config(args: EngineArgs) -> RayConfig | None:
    """Return where Ray places the ranks; None: they run on this machine."""
    return RayConfig(args.ray_address, args.nodes) if args.executor == "ray" else None
