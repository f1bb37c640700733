"""From the flags of `quire simulate` to a simulation: step times and the engine's settings.

Step times come from a profile, which also holds the settings that the engine was measured with; flags and the file of
``--config`` change only settings on which step times do not depend. Or they come from the planner's roofline, for
hardware that is not at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.args import EngineArgs, make_args
from quire.config import CacheConfig
from quire.cost.cost_model import StepTime
from quire.cost.draft_cost import DraftCost
from quire.cost.efficiency import efficiency_of
from quire.cost.hardware import find_hardware
from quire.cost.kept_profiles import STATES
from quire.cost.links import RankedSteps
from quire.cost.profile import HostCost, Profile, Spread, load_profile
from quire.cost.ranks import cuts_rows
from quire.cost.roofline import Roofline, decoder_work
from quire.cost.split import PRECISIONS, Split
from quire.cost.states import fit_states
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.models.checkpoint import spec_of
from quire.models.precision import precision_of
from quire.modelspec import ModelSpec
from quire.parallel.topology import Topology
from quire.resolve import parse_bytes, scheduler_config
from quire.scheduler.policies.stages import StageRows, stage_rows
from quire.slo import Slo
from quire_gateway.autoscale import Bounds, PredictedLoad, Utilisation
from quire_lab.bench.args import SIMULATED, ServeBenchArgs, SimulateArgs
from quire_lab.bench.runs import make_workload
from quire_lab.plan.memory import plan_memory
from quire_lab.plan.replica import PlannedReplica
from quire_lab.sim.disaggregated import Pools
from quire_lab.sim.drafts import Speculation
from quire_lab.sim.latency import Swap
from quire_lab.sim.replica import ClusterConfig, parse_fault
from quire_lab.sim.run import Simulated, simulate, summary_of
from quire_lab.sim.scaling import Scaling
from quire_lab.workload.request import Workload

DEFAULT_NETWORK = 50e9  # bytes/s between replicas by default: 400 Gb/s
ROOFLINE_STEPS_IN_FLIGHT = 2  # the number on a GPU
# Settings of the server that was profiled, where no others are given.
_DEFAULTS = ("max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold")
# Settings that a profile was measured with.
MEASURED = ("dtype", "kv_dtype", "quantize", "threads", "cpu_isa")


@dataclass(frozen=True, slots=True)
class Setup:
    """The arguments of `quire_lab.sim.run.simulate`, and facts for the report."""

    config: ClusterConfig
    step_time: StepTime
    facts: Mapping[str, Any]
    slo: Slo | None
    args: SimulateArgs
    spread: Spread | None = None  # spread of the machine's speed, from the profile

    @property
    def scaling(self) -> Scaling | None:
        """The policy that changes the number of replicas; each simulation needs its own."""
        args, config = self.args, self.config
        if args.autoscale == "off":
            return None
        bounds = Bounds(least=args.min_replicas, most=args.max_replicas, down_after_s=args.down_after_s)
        if args.autoscale == "utilisation":
            return Utilisation(args.target_busy, bounds), args.interval_s
        assert self.slo is not None
        scheduler, kv_tokens = config.scheduler, config.cache.num_blocks * config.cache.block_size
        limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        replica = PlannedReplica(self.step_time, kv_tokens, *limits, self.slo)
        policy = PredictedLoad(replica, bounds, start_up_s=config.start_up_s, headroom=args.headroom)
        return policy, args.interval_s


@dataclass(frozen=True, slots=True)
class _Engine:
    """One replica: step times, memory, and the longest context."""

    step_time: StepTime
    num_kv_blocks: int
    block_size: int
    kv_block_bytes: float
    windows: tuple[int | None, ...]
    max_model_len: int
    max_in_flight: int
    stage_rows: StageRows | None
    host: HostCost
    facts: Mapping[str, Any]
    defaults: Mapping[str, Any]  # engine settings for those that are not given
    spread: Spread | None = None  # from the profile
    draft_cost: DraftCost | None = None  # from the profile
    # Where a model has recurrent layers: the slots that were profiled; None: a share of the memory is for them.
    states: Mapping[str, Any] | None = None
    spec: ModelSpec | None = None  # not of a profile


class ModelDoesNotFit(ConfigError):
    """The weights leave no room for K and V."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """One simulation, ready to run."""

    setup: Setup
    workload: Workload

    def run(self, watch: Callable[[Executor], Executor] | None = None) -> tuple[Simulated, dict[str, Any]]:
        """Return the result and its summary."""
        setup = self.setup
        result = simulate(setup.config, setup.step_time, self.workload, watch=watch, scaling=setup.scaling)
        return result, summary_of(result, setup.slo, self.workload)


def prepare(settings: Mapping[str, Any], origin: str) -> Prepared:
    """Return the simulation of ``settings``: flags of `quire simulate` by name; ``origin`` is for errors.

    Raises:
        ConfigError: a setting is wrong or unknown; `ModelDoesNotFit`, where only devices are too few.
    """
    parts = {
        kind: {k: v for k, v in settings.items() if k in kind.__dataclass_fields__}
        for kind in (SimulateArgs, ServeBenchArgs)
    }
    unknown = set(settings) - set(EngineArgs.__dataclass_fields__).union(*parts.values())
    if unknown:
        raise ConfigError(f"scenario {origin}: no flag is called {sorted(unknown)[0]!r}")
    args = make_args(SimulateArgs, parts[SimulateArgs], origin=origin)
    flags = make_args(ServeBenchArgs, parts[ServeBenchArgs], origin=origin)
    setup = set_up(args, flags, {k: v for k, v in settings.items() if k in SIMULATED})
    return Prepared(setup, make_workload(flags))


def set_up(args: SimulateArgs, flags: ServeBenchArgs, settings: Mapping[str, Any]) -> Setup:
    """Return the simulation that ``args`` and the engine's ``settings`` (key → value, only those given) describe.

    ``flags``: those of the load, of which it takes the seed and the concurrency.

    Raises:
        ConfigError: a setting is wrong, or differs from the one that the profile was measured with.
    """
    if (args.profile is None) == (args.hardware is None):
        raise ConfigError(
            "give either --profile FILE (of `quire profile`) or --hardware NAME with --model NAME"
        )
    if args.pipeline_parallel_size > 1 and args.max_in_flight is not None:
        raise ConfigError("max_in_flight: a pipeline has as many steps in flight as stages: leave it out")
    engine = _profiled(args, settings) if args.profile is not None else _roofline(args, settings)
    chosen = {**engine.defaults, **{k: v for k, v in settings.items() if k in SIMULATED}}
    engine_args = make_args(EngineArgs, chosen, origin="simulate")
    max_model_len = engine_args.max_model_len or engine.max_model_len
    if max_model_len > engine.max_model_len:
        raise ConfigError(
            f"max_model_len = {max_model_len} is more than the model's {engine.max_model_len} positions"
        )
    block_size = engine_args.block_size if "block_size" in chosen else engine.block_size
    engine, engine_args = _with_states(engine, engine_args)
    pools = _pools(args, engine, engine_args, block_size)
    config = ClusterConfig(
        scheduler=scheduler_config(engine_args, max_model_len),
        cache=CacheConfig(
            num_blocks=_num_blocks(engine, engine_args, block_size),
            block_size=block_size,
            windows=engine.windows,
            enable_prefix_caching=engine_args.enable_prefix_caching,
            model_key="simulated",
            **(engine.states or {}),
        ),
        num_replicas=args.replicas if pools is None else pools.num_prefill + pools.num_decode,
        pools=pools,
        start_up_s=args.start_up_s,
        routing=args.routing,
        max_load_ratio=args.max_load_ratio,
        max_in_flight=args.max_in_flight or engine.max_in_flight,
        num_stages=args.pipeline_parallel_size,
        stage_rows=engine.stage_rows,
        speculation=_speculation(args, engine.draft_cost),
        swap=_swap(args, engine),
        faults=tuple(parse_fault(text.strip()) for text in (args.fault or "").split(";") if text.strip()),
        request_s=engine.host.request_s,
        per_prompt_token_s=engine.host.per_prompt_token_s,
        seed=flags.seed,
        concurrency=flags.concurrency,
    )
    slo = Slo.parse(flags.slo) if flags.slo else None
    if args.autoscale == "predicted" and slo is None:
        raise ConfigError("--autoscale predicted needs --slo: it asks for the replicas that hold it")
    if not args.min_replicas <= args.replicas <= args.max_replicas and args.autoscale != "off":
        raise ConfigError(
            f"replicas = {args.replicas} must be in {args.min_replicas}…{args.max_replicas} (--min-replicas, "
            "--max-replicas)"
        )
    return Setup(config, engine.step_time, engine.facts, slo, args, engine.spread)


def _profiled(args: SimulateArgs, settings: Mapping[str, Any]) -> _Engine:
    assert args.profile is not None
    profile = load_profile(Path(args.profile))
    if args.model not in (None, profile.model):
        raise ConfigError(f"model = {args.model!r}, but {args.profile} was measured with {profile.model!r}")
    measured = profile.settings
    for name in MEASURED:
        value = settings.get(name)
        if value not in (None, "auto", measured.get(name)):
            raise ConfigError(
                f"{name} = {value!r}, but {args.profile} was measured with {measured.get(name)!r}: profile it again"
            )
    try:
        return _Engine(
            step_time=_ranked(args, profile),
            num_kv_blocks=measured["num_kv_blocks"],
            block_size=measured["block_size"],
            kv_block_bytes=measured["kv_block_bytes"],
            windows=tuple(measured["windows"]),
            max_model_len=measured["max_model_len"],
            max_in_flight=measured["max_in_flight"],
            stage_rows=_stage_rows(args, profile.model, str(measured.get("cpu_isa"))),
            host=profile.host_of(_topology(args, profile.model)),
            spread=profile.spread,
            draft_cost=profile.draft,
            facts={
                "model": profile.model,
                "machine": f"{profile.machine.get('name')}, {measured.get('threads')} threads",
                "step times": f"{args.profile}, measured {profile.measured_at}"
                + (f", median error {profile.error.median:.1%}" if profile.error else ""),
                **_cut(_topology(args, profile.model)),
            },
            defaults={k: measured[k] for k in _DEFAULTS if k in measured},
            states={k: measured[k] for k in STATES if k in measured},
        )
    except KeyError as error:
        raise ConfigError(f"profile {args.profile}: settings lack {error}") from error


def _topology(args: SimulateArgs, model: str) -> Topology:
    tp, is_whole = args.tensor_parallel_size, args.enable_expert_parallel
    if is_whole and tp == 1:
        raise ConfigError(
            "enable_expert_parallel needs tensor_parallel_size of 2 or more, whose ranks share the experts"
        )
    layout = args.tensor_parallel_layout
    if is_whole and layout == "sums":
        raise ConfigError("enable_expert_parallel cuts matrices by rows: leave tensor_parallel_layout out")
    by_rows = is_whole or (tp > 1 and cuts_rows(layout, spec_of(model)))
    return Topology(
        tp=1 if by_rows else tp, ep=tp if by_rows else 1, pp=args.pipeline_parallel_size,
        cp=args.context_parallel_size,
    )  # fmt: skip


def _stage_rows(args: SimulateArgs, model: str, kernels: str) -> StageRows | None:
    stages = args.pipeline_parallel_size
    return None if stages == 1 else stage_rows(spec_of(model).num_active_params, stages, kernels)


def _cut(topology: Topology) -> dict[str, str]:
    """Return the line of the report that says how a replica is cut, if it is."""
    return {} if topology.world_size == 1 else {"ranks": f"{topology.world_size}: {topology}"}


def _ranked(args: SimulateArgs, profile: Profile) -> StepTime:
    """Return the step times of the profile, cut over ranks."""
    topology = _topology(args, profile.model)
    host = profile.host_of(topology)
    if topology.world_size == 1:
        return profile.step_time
    return RankedSteps(
        profile.executor.plus(per_row_s=host.per_row_s), spec_of(profile.model), topology, profile.links or {},
        profile.settings["dtype"], host_s=host.fixed_s, host_per_seq_s=host.per_seq_s,
    )  # fmt: skip


def _roofline(args: SimulateArgs, settings: Mapping[str, Any]) -> _Engine:
    assert args.hardware is not None
    if args.model is None:
        raise ConfigError("--hardware needs --model: a preset of the planner, a folder or a hub id")
    if args.weights is not None and args.weights not in PRECISIONS:
        raise ConfigError(f"weights = {args.weights!r} must be one of {', '.join(PRECISIONS)}")
    spec, hardware = spec_of(args.model), find_hardware(args.hardware)
    weights = args.weights or precision_of(args.model, spec)
    topology, tp = _topology(args, args.model), args.tensor_parallel_size
    ep = tp if args.enable_expert_parallel else 1
    split = Split(tp=tp, pp=topology.pp, ep=ep, cp=topology.cp)
    chunk = int(settings.get("max_num_batched_tokens") or 2048)
    memory = plan_memory(
        spec, hardware, split, precision=weights, kv_dtype="bf16", context=spec.max_position_embeddings,
        max_num_batched_tokens=chunk, max_num_seqs=int(settings.get("max_num_seqs") or 256),
    )  # fmt: skip
    block_size = 16
    layout = spec.kv_layout(spec.max_position_embeddings)
    block_bytes = layout.block_bytes(block_size, "bfloat16")
    num_blocks = int(memory.kv_pool * split.num_devices // block_bytes)
    if num_blocks < 2:
        raise ModelDoesNotFit(
            f"{args.model} as {weights} does not fit {split.num_devices} × {hardware.title}: "
            f"{memory.kv_pool / 2**30:.1f} GiB are left for the KV cache; raise --tensor-parallel-size"
        )
    efficiency = efficiency_of(args.engine or "default", hardware, spec, weights)
    work = decoder_work(spec, weights, "bf16", split)
    return _Engine(
        step_time=Roofline(work, hardware, efficiency, layout=args.tensor_parallel_layout),
        num_kv_blocks=num_blocks,
        block_size=block_size,
        kv_block_bytes=block_bytes,
        windows=tuple(group.window for group in layout.groups),
        max_model_len=spec.max_position_embeddings,
        max_in_flight=ROOFLINE_STEPS_IN_FLIGHT,
        stage_rows=_stage_rows(args, args.model, "amx"),
        host=HostCost(request_s=efficiency.first_s),
        facts={
            "model": f"{args.model} as {weights}",
            "machine": f"{split.num_devices} × {hardware.title}",
            **_cut(topology),
            "step times": "the planner's roofline",
        },
        defaults={},
        spec=spec,
    )


def _with_states(engine: _Engine, args: EngineArgs) -> tuple[_Engine, EngineArgs]:
    """Give recurrent states their share of the memory, and ``args`` as many sequences as there are states for."""
    if engine.spec is None or not engine.spec.state_layers:
        return engine, args
    pool = int(engine.num_kv_blocks * engine.kv_block_bytes)
    args, states, size, _ = fit_states(args, engine.spec, None, pool)
    num_blocks = max(2, int((pool - size) / engine.kv_block_bytes))
    return replace(engine, states=states, num_kv_blocks=num_blocks), args


def _num_blocks(engine: _Engine, args: EngineArgs, block_size: int) -> int:
    if args.num_kv_blocks is not None:
        return args.num_kv_blocks
    bytes_per_block = engine.kv_block_bytes * block_size / engine.block_size
    if args.kv_memory is not None:
        return max(2, int(parse_bytes(args.kv_memory) // bytes_per_block))
    return max(2, engine.num_kv_blocks * engine.block_size // block_size)


def _speculation(args: SimulateArgs, measured: DraftCost | None) -> Speculation | None:
    """Return what the flags say; ``measured``: what the profile knows of drafts. None: without speculation."""
    known = () if measured is None else measured.acceptance
    if args.acceptance is None and not known:
        for name in ("num_drafts", "draft_cost"):
            if getattr(args, name) != getattr(SimulateArgs(), name):
                why = (
                    ""
                    if measured is None
                    else ": the profile has the times of drafts, not how many are accepted"
                )
                raise ConfigError(f"{name} means nothing without --acceptance{why}")
        return None
    rates = known if args.acceptance is None else (args.acceptance,)
    return Speculation(rates, args.num_drafts or None, args.draft_cost or measured or 0.0)


def _pools(args: SimulateArgs, engine: _Engine, settings: EngineArgs, block_size: int) -> Pools | None:
    if args.disaggregate is None:
        if args.link_gb_s is not None:
            raise ConfigError("link_gb_s means nothing without --disaggregate")
        return None
    for name, wanted in (("replicas", 1), ("autoscale", "off")):
        if getattr(args, name) != wanted:
            raise ConfigError(
                f"{name} = {getattr(args, name)!r}: --disaggregate says how many replicas there are"
            )
    if not settings.enable_prefix_caching:
        raise ConfigError("--disaggregate needs the prefix cache: K and V arrive as blocks of it")
    network = find_hardware(args.hardware).network_bandwidth if args.hardware is not None else None
    bandwidth = args.link_gb_s * 1e9 if args.link_gb_s is not None else network or DEFAULT_NETWORK
    return Pools.parse(args.disaggregate, engine.kv_block_bytes * block_size / engine.block_size, bandwidth)


def _swap(args: SimulateArgs, engine: _Engine) -> Swap | None:
    if args.preemption == "recompute":
        return None
    return Swap(engine.kv_block_bytes / engine.block_size / (args.swap_gb_s * 1e9))
