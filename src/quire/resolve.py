"""`resolve`: the pure function from the user's settings, the model and the machine to an `EngineConfig`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from operator import itemgetter
from typing import Any

from quire.args import EngineArgs
from quire.config import (
    CacheConfig,
    DeviceInfo,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    packed_cache_config,
    row_tile,
)  # fmt: skip
from quire.cost.ranks import RankBytes, experts_config, ray_config, topology_of
from quire.cost.speculation import (
    DraftCheckpoint,
    Drafting,
    HeadCheckpoint,
    branch_blocks,
    draft_bytes,
    draft_config,
    draft_paths,
    probability_bytes,
    spec_tokens,
    speculate_config,
)  # fmt: skip
from quire.cost.split import GRAPH_BYTES, RUNTIME_BYTES, UTILIZATION, Split, row_bytes
from quire.device import FP8_CAPABILITY
from quire.device_formats import device_formats
from quire.errors import ConfigError
from quire.kv_layout import KV_CODE_BITS, KvLayout
from quire.modelspec import ModelSpec
from quire.parallel.topology import Topology
from quire.request import Adapter
from quire.weight_format import WeightFormat
from quire.weight_plan import WeightPlan, adapter_bytes, whole_ends

DEFAULT_LORA_RANK = 16
KV_SHARE = 0.5  # default share of the available memory that the weights leave
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str | int, *, name: str = "kv_memory") -> int:
    """Return bytes from ``4GiB``, ``512MB``, ``1.5 GiB`` or a plain number.

    Raises:
        ConfigError: the text is not of that form, or not above 0.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match.group(2).upper() not in UNITS:
        raise ConfigError(f"{name} = {text!r} is not a size: write for example 4GiB, 512MiB or 2GB")
    size = int(float(match.group(1)) * UNITS[match.group(2).upper()])
    if size <= 0:
        raise ConfigError(f"{name} = {text!r} must be more than 0 bytes")
    return size


def resolve(
    args: EngineArgs, spec: ModelSpec, device: DeviceInfo, *, path: str = "", tokenizer: str = "",
    stored: Mapping[str, WeightFormat] | None = None, adapters: Sequence[Adapter] = (),
    draft: DraftCheckpoint | HeadCheckpoint | None = None, remarks: tuple[str, ...] = (),
) -> EngineConfig:  # fmt: skip
    """Choose every setting that ``args`` leave open. ``path`` and ``tokenizer``: where the two were found.

    ``stored``, ``remarks``: `Checkpoint.formats`, and what else is to be said of its files. ``adapters``: those loaded
    from the start (`EngineArgs.lora`). ``draft``: the draft model or heads.

    Raises:
        ConfigError: a combination that cannot work, with the numbers and what to change.
    """
    if spec.encoder is not None:
        files = path, tokenizer, stored or {}, remarks
        resolved: EngineConfig = import_module("quire.resolve_encoder").resolve_encoder(
            args, spec, device, *files
        )
        return resolved
    topology = topology_of(args, spec, device, has_heads=isinstance(draft, HeadCheckpoint))
    dtype = _dtype(args.dtype, spec)
    plan = device_formats(args, spec, stored or {}, dtype, device, topology)
    lora = _lora(args, tuple(adapters))
    kv_dtype = _kv_dtype(args, spec, dtype, device)
    rank_bytes = RankBytes(spec, topology, plan.formats, dtype, kv_dtype, args.block_size)
    spec, weights, of_vision = _with_vision(args, spec, dtype, device, topology, rank_bytes.weights)
    if lora is not None:
        weights += lora.max_loras * adapter_bytes(spec, lora.max_rank, dtype, lora.saved) * topology.per_stage
    drafts = draft_config(args, spec, draft, dtype)
    weights += draft_bytes(drafts, args.block_size * topology.cp)[0] + rank_bytes.copies(drafts)
    slots: dict[str, int] = {}
    if spec.state_layers:
        left = device.memory_available_bytes * (args.nodes or 1) - step_bytes(args, spec) - weights
        args, slots, size, more = import_module("quire.cost.states").fit_states(args, spec, device, left)
        weights, remarks = weights + size, (*remarks, *more)
    max_model_len, num_blocks = _lengths(args, spec, device, rank_bytes, weights, drafts)
    layout, runner = spec.kv_layout(max_model_len), runner_of(args, device, topology)
    return EngineConfig(
        model=ModelConfig(
            path=path, name=args.model, spec=spec, dtype=dtype, kv_dtype=kv_dtype, max_model_len=max_model_len,
            load_format=args.load_format, quantize=args.quantize, seed=args.seed, tokenizer=tokenizer,
            formats=plan.formats, remarks=(*remarks, *of_vision, *plan.remarks, *_kv_remarks(kv_dtype, device)),
            packed_cache=packed_cache_config(args.packed_cache, args.packed_cache_mib),
        ),
        kv_layout=layout,
        cache=_cache_config(
            args, num_blocks, layout, _model_key(args, path, spec, dtype, kv_dtype, plan, topology), slots
        ),
        scheduler=scheduler_config(
            args, max_model_len, 0 if lora is None else lora.max_loras, long_tokens=long_tokens(device, runner)
        ),
        runner=runner,
        device=device,
        lora=lora,
        speculate=speculate_config(args, device, drafts, max_model_len, len(layout.groups)),
        topology=topology,
        ray=ray_config(args),
        experts=experts_config(args, topology),
    )  # fmt: skip


def _with_vision(
    args: EngineArgs, spec: ModelSpec, dtype: str, device: DeviceInfo, topology: Topology, weights: int
) -> tuple[ModelSpec, int, tuple[str, ...]]:
    """Return ``spec`` without an encoder that cannot run, the bytes of all weights, and what is to be said of it."""
    if spec.vision is None:
        return spec, weights, ()
    spec, size, remarks = import_module("quire.cost.vision").fit_vision(args, spec, dtype, device, topology)
    return spec, weights + size, remarks


def _cache_config(
    args: EngineArgs, num_blocks: int, layout: KvLayout, model_key: str, slots: Mapping[str, Any]
) -> CacheConfig:
    return CacheConfig(
        num_blocks=num_blocks,
        block_size=args.block_size * args.context_parallel_size,
        windows=tuple(group.window for group in layout.groups),
        enable_prefix_caching=args.enable_prefix_caching,
        model_key=model_key,
        **slots,
    )


def _model_key(
    args: EngineArgs, path: str, spec: ModelSpec, dtype: str, kv_dtype: str, plan: WeightPlan,
    topology: Topology,
) -> str:  # fmt: skip
    formats = sorted(plan.formats.items(), key=itemgetter(0))
    scope = f"{path}|{args.seed}|{spec!r}|{dtype}|{kv_dtype}|{formats!r}"
    if topology.tp > 1 or topology.cp > 1:  # the sizes that bits depend on
        scope += f"|tp{topology.tp}|cp{topology.cp}"
    return hashlib.blake2b(scope.encode(), digest_size=16).hexdigest()


def _lora(args: EngineArgs, adapters: tuple[Adapter, ...]) -> LoraConfig | None:
    """Return slots for every adapter loaded from the start, unless the settings say otherwise."""
    ranks = [adapter.rank for adapter in adapters]
    max_loras = len(ranks) if args.max_loras is None else args.max_loras
    if max_loras == 0:
        if ranks:
            raise ConfigError(
                "max_loras = 0 leaves no slot for the adapters of lora: raise it, or leave lora out"
            )
        return None
    highest = max(ranks, default=DEFAULT_LORA_RANK)
    max_rank = highest if args.max_lora_rank is None else args.max_lora_rank
    if max_rank < max(ranks, default=0):
        raise ConfigError(
            f"max_lora_rank = {max_rank} is less than the rank {highest} of an adapter of lora: raise it"
        )
    return LoraConfig(max_loras, max_rank, adapters, whole_ends(args.lora_modules_to_save, adapters))


def _dtype(wanted: str, spec: ModelSpec) -> str:
    dtype = spec.dtype if wanted == "auto" else wanted
    return "bfloat16" if dtype == "float16" else dtype  # a CPU has no fast float16; bfloat16 has its range


def _kv_dtype(args: EngineArgs, spec: ModelSpec, dtype: str, device: DeviceInfo) -> str:
    if args.kv_dtype == "auto":
        return dtype
    if args.kv_dtype == "fp8" and device.capability < FP8_CAPABILITY:
        raise ConfigError(
            f"kv_dtype = 'fp8' needs a GPU of compute capability {'.'.join(map(str, FP8_CAPABILITY))} or more, and "
            f"{device.name} has none: 'int8' takes the same bytes"
        )
    if device.kind == "cuda" and "int4" in args.kv_dtype:
        raise ConfigError(f"kv_dtype = {args.kv_dtype!r} is for a CPU: on {device.name} take 'int8' or 'fp8'")
    attention = spec.attentions
    unmet = (
        f"a compute type of bfloat16, not {dtype}" if dtype != "bfloat16"
        else f"a block_size that is a multiple of 16, not {args.block_size}" if args.block_size % 16
        else "keys and values of their own, and this model caches latents (MLA)" if any(a.is_mla for a in attention)
        else "heads of an even size" if any(a.head_dim % 2 or a.v_head_dim % 2 for a in attention)
        else None
    )  # fmt: skip
    if unmet is not None:
        raise ConfigError(f"kv_dtype = {args.kv_dtype!r} needs {unmet}; leave it at 'auto', or change that")
    return args.kv_dtype


def _kv_remarks(kv_dtype: str, device: DeviceInfo) -> tuple[str, ...]:
    """Return what a cache in codes of 8 or 4 bits costs, as it was measured (benchmarks/results/fidelity.md)."""
    if device.kind != "cpu" or kv_dtype not in KV_CODE_BITS:
        return ()
    fidelity = import_module("quire.cost.fidelity")
    figure = fidelity.KV_CODES[kv_dtype]
    return (f"K and V in {kv_dtype} add {figure} nats to the mean KL from fp32 of {fidelity.KV_MODELS}",)


def runner_of(args: EngineArgs, device: DeviceInfo, topology: Topology) -> RunnerConfig:
    """Return how workers execute, or raise `ConfigError` where a level or a profile cannot be had."""
    if args.profile_steps is not None and args.profile_dir is None:
        raise ConfigError("profile_steps needs profile_dir, the folder that the trace is written to")
    chosen = _backend(args, device, topology)
    return replace(chosen, profile_dir=args.profile_dir, profile_steps=args.profile_steps)


def _backend(args: EngineArgs, device: DeviceInfo, topology: Topology) -> RunnerConfig:
    cores = device.num_cores * (args.nodes or 1)
    threads, isa = args.threads or max(1, cores // topology.world_size), args.cpu_isa
    if device.kind != "cpu":
        if isa != "auto":
            raise ConfigError(f"cpu_isa = {isa!r} is for a CPU, and the model runs on {device.name}")
        return RunnerConfig(threads, "triton", batch_invariant=args.batch_invariant, step_log=args.step_log)
    if args.gpu_memory is not None:
        raise ConfigError(
            f"gpu_memory = {args.gpu_memory!r} is for a GPU, and the model runs on this CPU: see kv_memory"
        )
    if isa == "reference" or (isa == "auto" and not device.native):
        return RunnerConfig(threads, step_log=args.step_log)
    if not device.native:
        raise ConfigError(
            f"cpu_isa = {isa!r} needs the native extension, which is not built: see `quire doctor`"
        )
    best = device.levels[-1]
    level = best if isa == "auto" else isa
    if level not in device.levels:
        raise ConfigError(f"cpu_isa = {isa!r} is more than this CPU has: at most {best!r}")
    return RunnerConfig(threads, "native", level, step_log=args.step_log)


def long_tokens(device: DeviceInfo, runner: RunnerConfig) -> int:
    """Return the default of ``long_prefill_token_threshold``: tiles that keep the cores busy, and no more; GPU: 0."""
    tile = row_tile(runner.kernels)
    return -(-max(108, 24 * device.num_cores) // tile) * tile if device.kind == "cpu" else 0


def scheduler_config(
    args: EngineArgs, max_model_len: int, max_loras: int = 0, *, long_tokens: int = 0
) -> SchedulerConfig:
    """Return the settings of the scheduler. ``long_tokens``: a default.

    Raises:
        ConfigError: a long prompt could never run.
    """
    if not args.enable_chunked_prefill and args.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens = {args.max_num_batched_tokens} is less than max_model_len = {max_model_len}, and "
            "enable_chunked_prefill is off: a long prompt could never run. Raise it, or allow chunks"
        )
    asked_long = args.long_prefill_token_threshold
    return SchedulerConfig(
        gate=args.gate,
        order=args.order,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=max_model_len,
        max_queue=args.max_queue,
        max_queue_tokens=args.max_queue_tokens,
        max_queue_bytes=args.max_queue_mib * 2**20,
        max_ttft_s=None if args.max_ttft_ms is None else args.max_ttft_ms / 1e3,
        enable_chunked_prefill=args.enable_chunked_prefill,
        long_prefill_token_threshold=long_tokens if asked_long is None else asked_long,
        dynamic_max_wait_s=args.dynamic_max_wait_ms / 1e3,
        max_loras=max_loras,
        max_num_drafts=spec_tokens(args),
        adaptive_drafts=args.spec_tokens == "auto",
        max_draft_paths=draft_paths(args),
    )


def _lengths(
    args: EngineArgs, spec: ModelSpec, device: DeviceInfo, rank_bytes: RankBytes, weights: int,
    drafts: Drafting | None,
) -> tuple[int, int]:  # fmt: skip
    """Return (max_model_len, num_blocks) so that at least one sequence of max_model_len fits."""
    asked_len = args.max_model_len
    if asked_len is not None and asked_len > spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len = {asked_len} is more than the model's {spec.max_position_embeddings} positions"
        )
    wanted = asked_len or spec.max_position_embeddings
    size = args.block_size * args.context_parallel_size
    num_blocks = args.num_kv_blocks or _blocks_in_memory(
        args, spec, device, rank_bytes, wanted, weights, drafts
    )
    while wanted > 1:
        need = blocks_for_sequence(spec, wanted, size, args.max_num_batched_tokens)
        if need <= num_blocks:
            return wanted, num_blocks
        if asked_len is not None:
            raise ConfigError(
                f"max_model_len = {wanted} needs {need} KV blocks of {size} tokens, and there is room for "
                f"{num_blocks}: lower it, or raise kv_memory"
            )
        wanted = wanted * 7 // 8 if wanted > 64 else wanted - 1
    raise ConfigError(f"{num_blocks} KV blocks cannot hold one sequence: raise kv_memory or num_kv_blocks")


def blocks_for_sequence(spec: ModelSpec, length: int, block_size: int, chunk: int) -> int:
    """Return the most blocks of a sequence of ``length`` tokens over all groups, plus one for a copied last block."""
    total = 1
    for group in spec.kv_layout(length).groups:
        tokens = (
            length if group.window is None else min(length, group.window + min(chunk, length) + block_size)
        )
        total += -(-tokens // block_size)
    return total


def _blocks_in_memory(
    args: EngineArgs, spec: ModelSpec, device: DeviceInfo, rank_bytes: RankBytes, max_len: int, weights: int,
    drafts: Drafting | None,
) -> int:  # fmt: skip
    if device.kind == "cuda":
        available = _gpu_memory_left(args, spec, device)
    else:
        nodes = args.nodes or 1  # taken to be alike
        available = nodes * device.memory_available_bytes - step_bytes(args, spec)
    layout = spec.kv_layout(max_len)
    page = rank_bytes.block(layout)
    available -= page * branch_blocks(args, len(layout.groups))
    size = args.block_size * args.context_parallel_size
    page += draft_bytes(drafts, size)[1]
    if args.kv_memory is not None:
        budget = parse_bytes(args.kv_memory)
        if weights + budget > available:
            raise ConfigError(
                f"kv_memory = {budget / 2**30:.2f} GiB and {weights / 2**30:.2f} GiB of weights are more than the "
                f"{available / 2**30:.2f} GiB of memory that are available beside a step: lower kv_memory",
                param="kv_memory",
            )
    elif device.kind == "cuda":
        budget = available - weights
    elif args.gpu_memory_utilization is not None:
        budget = int(available * args.gpu_memory_utilization) - weights
    else:
        num_blocks = blocks_for_sequence(spec, max_len, size, args.max_num_batched_tokens)
        budget = min(int((available - weights) * KV_SHARE), args.max_num_seqs * num_blocks * page)
    if budget < 2 * page and args.kv_memory is not None:
        raise ConfigError(
            f"kv_memory = {args.kv_memory!r} is less than two blocks of {size} tokens, {2 * page} bytes: "
            "raise it (4GiB, 512MiB …)"
        )
    if budget < 2 * page:
        raise ConfigError(
            f"{weights / 2**30:.2f} GiB of weights leave no room for a KV cache in {available / 2**30:.2f} GiB of "
            "available memory: free some, or take a smaller model",
            param="kv_memory",
        )
    return budget // page


def _gpu_memory_left(args: EngineArgs, spec: ModelSpec, device: DeviceInfo) -> int:
    """Return a GPU's bytes for weights and KV cache: those allowed, minus activations, workspace and graphs."""
    if args.gpu_memory is not None:
        usable = parse_bytes(args.gpu_memory, name="gpu_memory")
        if usable > device.memory_available_bytes:
            raise ConfigError(
                f"gpu_memory = {usable / 2**30:.2f} GiB is more than the {device.memory_available_bytes / 2**30:.2f} "
                f"GiB that are free on {device.name}"
            )
    else:
        usable = int(device.memory_available_bytes * (args.gpu_memory_utilization or UTILIZATION))
    return usable - step_bytes(args, spec) - RUNTIME_BYTES["accelerator"] - GRAPH_BYTES["accelerator"]


def step_bytes(args: EngineArgs, spec: ModelSpec) -> int:
    """Return the bytes of the largest step: activations, logits, and a copy of logits that processors change.

    On a CPU the first two are in a tape's arena, whose gaps (a fifth, measured) are smaller than the copy. Drafts have
    a row of logits each, and with `rejection` the distribution that they were sampled from.
    """
    logits = args.max_num_seqs * spec.vocab_size * 4
    rows = min(args.max_num_batched_tokens, args.max_num_seqs * (1 + spec_tokens(args)))
    drafts = max(0, rows - args.max_num_seqs) * spec.vocab_size * 4 + probability_bytes(args, spec.vocab_size)
    return args.max_num_batched_tokens * row_bytes(spec, Split()) + 2 * logits + drafts
