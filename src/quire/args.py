"""The settings that users may give: names, types and defaults of every flag and TOML key; `settings.toml` has the rest.

`EngineArgs` are the keywords of `quire.LLM`, the flags of ``quire serve|run|chat`` and the keys of the TOML
file, under the same names; `ServerArgs` belong to ``quire serve`` alone. `quire.resolve.resolve` turns the
engine's into an `EngineConfig`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from quire.config import CacheConfig, GateKind, OrderKind, SchedulerConfig
from quire.errors import ConfigError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Args = TypeVar("Args", bound="DataclassInstance")


def defaults(kind: type[Args]) -> dict[str, Any]:
    """Return field → default of every field of ``kind`` that has one."""
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING}


_SCHEDULER = defaults(SchedulerConfig)


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """The engine's settings as a user gives them; None means that `resolve` chooses."""

    model: str = "quill"
    revision: str | None = None
    tokenizer: str | None = None
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    quantize: str | None = None
    quantize_head: str | None = None
    load_format: Literal["auto", "safetensors", "gguf", "random"] = "auto"
    seed: int = 0
    packed_cache: str = "auto"
    packed_cache_mib: int = 16_384
    lora: tuple[str, ...] = ()
    max_loras: int | None = None
    max_lora_rank: int | None = None
    lora_modules_to_save: tuple[str, ...] = ()
    max_model_len: int | None = None
    kv_memory: str | int | None = None
    kv_dtype: Literal["auto", "int8", "fp8", "int8/int4", "int4"] = "auto"
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float | None = None
    gpu_memory: str | int | None = None
    block_size: int = defaults(CacheConfig)["block_size"]
    enable_prefix_caching: bool = True
    state_checkpoints: str | int = "auto"
    kv_disk: str | None = None
    kv_remote: str | None = None
    kv_share: str | None = None
    kv_peers: str | None = None
    max_num_seqs: int = _SCHEDULER["max_num_seqs"]
    max_num_batched_tokens: int = _SCHEDULER["max_num_batched_tokens"]
    max_queue: int = _SCHEDULER["max_queue"]
    max_queue_tokens: int = 2**22
    max_queue_mib: int = 256
    max_ttft_ms: float | None = None
    gate: GateKind = "continuous"
    order: OrderKind = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int | None = None
    dynamic_max_wait_ms: float = 1000 * _SCHEDULER["dynamic_max_wait_s"]
    speculate: str | None = None
    draft_model: str | None = None
    spec_tokens: str | int = "auto"
    spec_tree: int = 1
    spec_accept: Literal["exact", "rejection", "typical"] = "exact"
    device: Literal["auto", "cpu", "cuda", "interpret"] = "auto"
    batch_invariant: bool = False
    tensor_parallel_size: str | int = 1
    tensor_parallel_layout: Literal["auto", "rows", "sums"] = "auto"
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    num_redundant_experts: int = 0
    eplb_step_interval: int = 3000
    executor: Literal["auto", "local", "ranks", "ray"] = "auto"
    nodes: int | None = None
    ray_address: str | None = None
    threads: int | None = None
    cpu_isa: Literal[
        "auto", "reference", "scalar", "avx2", "avx512_bw", "avx512_vnni", "avx512", "amx", "neon", "neon_i8mm",
    ] = "auto"  # fmt: skip
    step_log: str | None = None
    profile_dir: str | None = None
    profile_steps: int | None = None


def executor_of(args: EngineArgs) -> str:
    """Return which executor runs ``args``, as `quire.engine.build` names it."""
    if args.executor != "auto":
        return args.executor
    sizes = args.tensor_parallel_size, args.pipeline_parallel_size, args.context_parallel_size
    return "local" if all(str(size) == "1" for size in sizes) else "ranks"


def comma_list(text: str | None) -> tuple[str, ...]:
    """Return the parts of a setting that is a list with commas."""
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


@dataclass(frozen=True, slots=True)
class ServerArgs:
    """Settings of the HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    api_key_file: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    served_model_name: str | None = None
    clients: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_format: str = "auto"
    admin_port: int | None = None
    admin_host: str = "127.0.0.1"
    admin_socket: str | None = None
    admin_key: str | None = None
    lenient: bool = False
    strict_fields: bool = False
    cors_origins: str | None = None
    allowed_hosts: str | None = None
    max_body_mib: int = 32
    response_store_mib: int = 64
    slo: str | None = None
    profile: str | None = None
    batch_dir: str | None = None
    batch_concurrency: int = 8
    max_file_mib: int = 100
    file_store_mib: int = 10_240
    drain_timeout_s: float = 30.0
    handover: bool = False
    journal: str | None = None
    journal_mib: int = 256
    max_restarts: int = 3
    hang_timeout_s: float = 10.0
    golden_interval_s: float = 300.0
    probe_process: bool = True
    record_steps: int = 256
    record_dir: str | None = None
    record_ids: bool = True
    record_requests: str | None = None
    compare_to: str | None = None
    compare_latency: float = 0.25
    check: str | None = None
    max_kl: float | None = None
    replicas: int = 1
    data_parallel_size: int | None = None
    model_memory: str | int | None = None
    pin: tuple[str, ...] = ()
    keep_alive_s: float | None = None
    load_timeout_s: float = 120.0
    gateway: str | None = None
    gateway_key: str | None = None
    region: str | None = None
    role: Literal["prefill", "decode", "both"] = "both"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["human", "json"] = "human"
    otlp_traces_endpoint: str | None = None
    cockpit: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one setting. Square brackets in ``help`` hold the meaning of None."""

    name: str
    group: str
    # With NoneType where the setting may be left open; tuple for one that is given several times, as texts.
    types: tuple[type, ...]
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    short: str = ""  # short form of ``help`` in `--help`, where that is long
    rare: bool = False  # only shown by --help-all


def flag_name(key: str) -> str:
    return "--for" if key == "clients" else "--" + key.replace("_", "-")


@cache
def settings_of(kind: type[Any]) -> Mapping[str, Setting]:
    """Return key → description of every setting of ``kind``, in the order of its fields."""
    descriptions = {
        name: {"group": group, **({"help": value} if isinstance(value, str) else value)}
        for group, values in _file()[kind.__name__].items()
        for name, value in values.items()
    }
    hints = get_type_hints(kind)
    assert descriptions.keys() == hints.keys(), descriptions.keys() ^ hints.keys()
    return {f.name: _setting(f.name, hints[f.name], descriptions[f.name]) for f in fields(kind)}


@cache
def _file() -> Mapping[str, Any]:
    return tomllib.loads((files("quire") / "settings.toml").read_text())


def _setting(name: str, hint: Any, description: Mapping[str, Any]) -> Setting:
    parts = (hint,) if get_origin(hint) in (None, Literal, tuple) else get_args(hint)
    words = next((get_args(p) for p in parts if get_origin(p) is Literal), description.get("choices", ()))
    types = tuple({Literal: str, tuple: tuple}.get(get_origin(part), part) for part in parts)
    return Setting(name, types=types, **{**description, "choices": tuple(words)})


def rare_names() -> frozenset[str]:
    """Return the settings of the engine and the server that only ``--help-all`` shows."""
    known = (*settings_of(EngineArgs).values(), *settings_of(ServerArgs).values())
    return frozenset(setting.name for setting in known if setting.rare)


def make_args(kind: type[Args], values: Mapping[str, Any], *, origin: str) -> Args:
    """Build ``kind`` from key → value, checked for names, types, ranges and choices.

    Raises:
        ConfigError: names ``origin`` ("flag", a TOML file …), the key, the value and what is allowed.
    """
    known = settings_of(kind)
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{origin}: unknown setting {key!r}{nearest(key, known)}")
        _check(known[key], value, origin)
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _check(spec: Setting, value: Any, origin: str) -> None:
    if spec.types == (tuple,):
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{origin}: {spec.name} = {value!r} must be a list of texts")
        return
    if isinstance(value, int) and not isinstance(value, bool) and float in spec.types:
        value = float(value)
    if not any(type(value) is t for t in spec.types):
        names = " or ".join("nothing" if t is type(None) else t.__name__ for t in spec.types)
        raise ConfigError(f"{origin}: {spec.name} = {value!r} must be of type {names}")
    if spec.choices and value is not None and value not in spec.choices:
        raise ConfigError(f"{origin}: {spec.name} = {value!r} must be one of {', '.join(spec.choices)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if spec.low is not None and value < spec.low:
            raise ConfigError(f"{origin}: {spec.name} = {value!r} must be at least {spec.low}")
        if spec.high is not None and value > spec.high:
            raise ConfigError(f"{origin}: {spec.name} = {value!r} must be at most {spec.high}")
