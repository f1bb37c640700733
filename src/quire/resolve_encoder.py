"""Settings of an engine that runs an encoder: whole sequences in each step, and no cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.args import EngineArgs
from quire.config import CacheConfig, DeviceInfo, EngineConfig, ModelConfig, SchedulerConfig
from quire.device_formats import device_formats
from quire.errors import ConfigError
from quire.kv_layout import KvLayout
from quire.modelspec import ModelSpec
from quire.parallel.topology import Topology
from quire.resolve import runner_of, scheduler_config
from quire.units import GIB
from quire.weight_format import WeightFormat

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
    plan = device_formats(replace(args, quantize_head="none"), spec, stored, dtype, device, Topology())
    budget = max(args.max_num_batched_tokens, max_model_len)
    _check_memory(spec, spec.weight_bytes(dtype, plan.formats), budget, max_model_len, device)
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


def _check_memory(
    spec: ModelSpec, weight_bytes: int, num_rows: int, max_model_len: int, device: DeviceInfo
) -> None:
    """Raise `ConfigError` where weights and the largest step are more than the memory that is available."""
    encoder = spec.encoder
    assert encoder is not None
    # Rows of a block in fp32, and the scores of 256 rows of the longest text with their exponentials.
    rows = num_rows * 4 * (4 * spec.hidden_size + 2 * encoder.intermediate_size)
    scores = 2 * 4 * encoder.num_heads * 256 * max_model_len
    # The logits of 64 rows of a text.
    scores += 4 * 64 * spec.vocab_size * (encoder.vocabulary is not None)
    available = device.memory_available_bytes
    if weight_bytes + rows + scores > available:
        raise ConfigError(
            f"{weight_bytes / GIB:.2f} GiB of weights and {(rows + scores) / GIB:.2f} GiB for a step of {num_rows} "
            f"tokens are more than the {available / GIB:.2f} GiB of memory that are available: free memory, lower "
            "max_model_len or max_num_batched_tokens, or take dtype = 'bfloat16'",
            param="max_num_batched_tokens",
        )
