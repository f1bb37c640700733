"""Settings of an engine that runs an encoder: whole sequences in each step, and no cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.args import EngineArgs
from quire.config import CacheConfig, DeviceInfo, EngineConfig, ModelConfig, SchedulerConfig
from quire.errors import ConfigError
from quire.kv_layout import KvLayout
from quire.modelspec import ModelSpec
from quire.parallel.topology import Topology
from quire.resolve import runner_of, scheduler_config
from quire.weight_format import WeightFormat
from quire.weight_plan import plan_weights

# Settings that speak of a cache, of drafts, of adapters or of several ranks, and the values that ask for nothing.
_UNUSED = {
    "speculate": None, "draft_model": None, "lora": (), "max_loras": None, "kv_disk": None, "kv_remote": None,
    "kv_share": None, "kv_peers": None,
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "context_parallel_size": 1, "kv_dtype": "auto",
}  # fmt: skip


def resolve_encoder(
    args: EngineArgs, spec: ModelSpec, device: DeviceInfo, path: str, tokenizer: str,
    stored: Mapping[str, WeightFormat], remarks: tuple[str, ...],
) -> EngineConfig:  # fmt: skip
    """Return the configuration of an encoder; arguments as of `resolve.resolve`.

    A step takes as many whole sequences as fit ``max_num_batched_tokens``; where that is less than one sequence of
    ``max_model_len`` tokens, such a sequence runs alone. A seat is a block as long as a
    sequence, in a cache of no bytes.

    Raises:
        ConfigError: a setting has no meaning for an encoder, or asks for more positions than there are.
    """
    assert spec.encoder is not None
    if device.kind != "cpu":
        raise ConfigError(f"{spec.architecture} is an encoder, and encoders run on a CPU: set device = 'cpu'")
    for name, neutral in _UNUSED.items():
        if getattr(args, name, neutral) not in (neutral, None):
            raise ConfigError(
                f"{name} = {getattr(args, name)!r} has no use with {spec.architecture}, an encoder, which has no cache "
                "and writes no text: leave it out"
            )
    longest, sentence = spec.max_position_embeddings, spec.sentence
    if args.max_model_len is not None and args.max_model_len > longest:
        raise ConfigError(
            f"max_model_len = {args.max_model_len} is more than the model's {longest} positions"
        )
    usual = longest if sentence is None or sentence.max_tokens is None else min(longest, sentence.max_tokens)
    max_model_len = args.max_model_len or usual
    dtype = spec.dtype if args.dtype == "auto" else args.dtype
    dtype = "bfloat16" if dtype == "float16" else dtype
    if args.quantize_head is not None:
        raise ConfigError(
            f"quantize_head = {args.quantize_head!r} has no use: an encoder has no output matrix"
        )
    plan = plan_weights(spec, stored, args.quantize, "none")
    budget = max(args.max_num_batched_tokens, max_model_len)
    scheduler: SchedulerConfig = scheduler_config(
        replace(args, enable_chunked_prefill=False, max_num_batched_tokens=budget), max_model_len
    )
    return EngineConfig(
        model=ModelConfig(
            path=path, name=args.model, spec=spec, dtype=dtype, kv_dtype=dtype, max_model_len=max_model_len,
            load_format=args.load_format, quantize=args.quantize, seed=args.seed, tokenizer=tokenizer,
            formats=plan.formats, remarks=(*remarks, *plan.remarks),
        ),
        kv_layout=KvLayout(()),
        cache=CacheConfig(args.max_num_seqs, max_model_len, enable_prefix_caching=False),
        scheduler=scheduler,
        runner=runner_of(args, device, Topology()),
        device=device,
    )  # fmt: skip
