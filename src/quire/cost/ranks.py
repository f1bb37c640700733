"""How the settings cut a model over ranks, and where the ranks run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.args import EngineArgs
from quire.config import DeviceInfo, ExpertsConfig, HeadsConfig, RayConfig
from quire.cost.speculation import Drafting
from quire.errors import ConfigError
from quire.kv_layout import KvLayout
from quire.modelspec import ModelSpec, matrix_bytes, weight_shapes
from quire.parallel.placement import place
from quire.parallel.shard import shard
from quire.parallel.topology import Topology
from quire.weight_format import PLAIN, WeightFormat


def topology_of(
    args: EngineArgs, spec: ModelSpec, device: DeviceInfo, *, has_heads: bool = False
) -> Topology:
    """Return how the model is cut over ranks. ``has_heads``: drafts come from heads on the model.

    Raises:
        ConfigError: this machine or the executor cannot run so many.
    """
    tp = device.num_nodes if args.tensor_parallel_size == "auto" else args.tensor_parallel_size
    if not str(tp).isdecimal():
        raise ConfigError(f"tensor_parallel_size = {tp!r} must be 'auto' or a number of at least 1")
    topology = Topology(tp=int(tp), pp=args.pipeline_parallel_size, cp=args.context_parallel_size)
    if args.enable_expert_parallel:
        topology = _of_experts(args, spec, topology)
    elif args.enable_eplb or args.num_redundant_experts:
        raise ConfigError("enable_eplb and num_redundant_experts need enable_expert_parallel")
    elif cuts_rows(args.tensor_parallel_layout, spec):
        topology = replace(topology, tp=1, ep=topology.tp)
    if args.enable_eplb and topology.cp > 1:
        raise ConfigError(
            f"enable_eplb: with {topology} each rank counts its own rows only: leave one of them out"
        )
    world = topology.world_size
    if args.executor != "ray" and (args.nodes is not None or args.ray_address is not None):
        raise ConfigError("nodes and ray_address need executor = 'ray'")
    place(topology, args.nodes)
    if world == 1:
        return topology
    if has_heads and topology.cp > 1:
        raise ConfigError(
            f"{topology}: heads that draft (Medusa, EAGLE) need the hidden states of all positions on one rank: leave "
            "them out, or context_parallel_size"
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


def cuts_rows(layout: str, spec: ModelSpec) -> bool:
    """Return whether ranks of ``tensor_parallel_layout`` gather results, which gives the bits of one process.

    Cut by rows experts lie whole on a rank each, which may leave others idle: not by default.
    """
    return layout == "rows" or (layout == "auto" and not any(layer.mlp.moe for layer in spec.layers))


def _of_experts(args: EngineArgs, spec: ModelSpec, topology: Topology) -> Topology:
    """Return ``topology`` with whole experts, whose ranks are those of the tp axis."""
    if not any(layer.mlp.moe for layer in spec.layers):
        raise ConfigError("enable_expert_parallel: the model has no experts; leave it out")
    if args.tensor_parallel_layout == "sums":
        raise ConfigError(
            "enable_expert_parallel cuts matrices by rows: leave tensor_parallel_layout = 'sums' out"
        )
    if topology.tp == 1:
        raise ConfigError(
            "enable_expert_parallel spreads the experts over the ranks of tensor_parallel_size, which is 1: give 2 or "
            "more, or leave it out"
        )
    return replace(topology, tp=1, ep=topology.tp, redundant_experts=args.num_redundant_experts)


def experts_config(args: EngineArgs, topology: Topology) -> ExpertsConfig | None:
    """Return how experts are balanced; None: no rank has whole ones of its own."""
    if not args.enable_expert_parallel or topology.ep == 1:
        return None
    return ExpertsConfig(args.enable_eplb, args.eplb_step_interval)


def ray_config(args: EngineArgs) -> RayConfig | None:
    """Return where Ray places the ranks; None: they run on this machine."""
    return RayConfig(args.ray_address, args.nodes) if args.executor == "ray" else None


class RankBytes:
    """The bytes of all ranks together: a KV head that several ranks have counts as often."""

    def __init__(
        self, spec: ModelSpec, topology: Topology, formats: Mapping[str, WeightFormat], dtype: str, kv_dtype: str,
        block_size: int,
    ) -> None:  # fmt: skip
        """Raises `ConfigError` where a size of ``topology`` is larger than what it cuts."""
        self._parts = [shard(spec, topology, rank, formats) for rank in range(topology.world_size)]
        self._kv_dtype, self._block_size = kv_dtype, block_size
        self._spec, self._formats, self._dtype = spec, formats, dtype
        self._answering = self._parts[topology.answering_rank]
        self.weights = sum(part.weight_bytes(dtype, formats) for part in self._parts)

    def copies(self, drafts: Drafting | None) -> int:
        """Return the bytes of what the rank that drafts reads a second time, since others have parts of it."""
        if not isinstance(drafts, HeadsConfig):
            return 0
        shapes, names = weight_shapes(self._spec), self._answering.lacks(drafts.spec.shared(self._spec))
        return sum(matrix_bytes(shapes[n], self._dtype, self._formats.get(n, PLAIN)) for n in names)

    def block(self, layout: KvLayout) -> int:
        """Return the bytes of one block of the model's cache."""
        layouts = (part.kv_layout(layout) for part in self._parts)
        return sum(kv_layout.block_bytes(self._block_size, self._kv_dtype) for kv_layout in layouts)
