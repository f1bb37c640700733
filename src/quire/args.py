"""What a person may set, as data: names, defaults, units, ranges and help of every flag and TOML key.

`EngineArgs` are the keywords of `quire.LLM`, the flags of ``quire serve|run|chat`` and the keys of the TOML
file, under the same names; `ServerArgs` belong to ``quire serve`` alone. `quire.resolve.resolve` turns the
engine's into an `EngineConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints

from quire.config import GATES, ORDERS
from quire.errors import ConfigError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DTYPES = ("auto", "bfloat16", "float32", "float16")
DEVICES = ("auto", "cpu", "cuda", "interpret")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "random")
ISAS = ("auto", "reference", "scalar", "avx2", "avx512", "amx")
# The names of quire.text.output.FORMATS (a test compares them: nothing here imports what needs reading).
TOOL_FORMATS = (
    "auto", "harmony", "minimax", "seed", "qwen3-coder", "glm-4.x", "deepseek-v3.1", "deepseek-v3", "kimi-k2",
    "mistral", "mistral-json", "solar", "granite", "apertus", "apriel", "lfm2", "llama4-pythonic", "functionary-v3.1",
    "functionary-v3.2", "llama3-json", "functools", "gigachat", "command-r", "gemma-4", "hermes", "json", "reasoning",
    "plain",
)  # fmt: skip


# Shown by --help-all and docs/cli.md, not by --help: what few people ever set. The others are 40 at most.
RARE = frozenset({
    "load_format", "quantize_head", "max_loras", "max_lora_rank", "num_kv_blocks", "block_size", "max_queue",
    "dynamic_max_wait_ms", "gpu_memory_utilization", "admin_host", "admin_socket", "admin_key", "max_body_mib",
    "response_store_mib", "batch_concurrency", "max_file_mib", "drain_timeout_s", "max_restarts",
})  # fmt: skip


def flag(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
) -> Any:
    """One setting. Square brackets in ``help`` hold what None stands for."""
    return field(
        default=default,
        metadata={"help": help, "group": group, "choices": choices, "low": low, "high": high},
    )


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """The engine's settings as a person gives them; None means "choose for me"."""

    model: str = flag("quill", "Model: 'quill', a local folder, a .gguf file, or a hub id.", group="Model")
    revision: str | None = flag(None, "Branch, tag or commit of a hub id.", group="Model")
    tokenizer: str | None = flag(None, "Folder of the tokenizer, if it is not the model's.", group="Model")
    dtype: str = flag("auto", "Compute type; auto is the checkpoint's (float16 runs as bfloat16 on a CPU).",
                       group="Model", choices=DTYPES)  # fmt: skip
    quantize: str | None = flag(None, "Weights: int8, int4, int4-g64 …, or none to expand a quantized checkpoint [as "
                                 "stored].", group="Model")  # fmt: skip
    quantize_head: str | None = flag(None, "The same for the output matrix [int8 with --quantize].",
                                      group="Model")  # fmt: skip
    load_format: str = flag("auto", "Format of the weights; random needs only a config.json.",
                             group="Model", choices=LOAD_FORMATS)  # fmt: skip
    seed: int = flag(0, "Seed of random weights.", group="Model", low=0)
    lora: tuple[str, ...] = flag((), "LoRA adapter as name=path, a PEFT folder or a hub id; requests name it as their "
                                  "model. May be given more than once.", group="Adapters")  # fmt: skip
    max_loras: int | None = flag(None, "Different adapters that a step can have; above 0, more may be loaded at run "
                                  "time [as many as --lora].", group="Adapters", low=0, high=1024)  # fmt: skip
    max_lora_rank: int | None = flag(None, "Largest rank of an adapter [of those of --lora; else 16].",
                                      group="Adapters", low=1, high=1024)  # fmt: skip
    max_model_len: int | None = flag(None, "Context, prompt + output, in tokens [the model's, if the KV cache "
                                      "can hold it].", group="Memory", low=1)  # fmt: skip
    kv_memory: str | int | None = flag(None, "Memory for the KV cache, e.g. 4GiB [half of what the weights leave "
                                        "available].", group="Memory")  # fmt: skip
    kv_dtype: str = flag("auto", "Type of the KV cache; auto is the compute type, int8 and (on a GPU) fp8 take half "
                          "of bfloat16.", group="Memory", choices=("auto", "int8", "fp8"))  # fmt: skip
    num_kv_blocks: int | None = flag(
        None, "KV cache in blocks, instead of --kv-memory.", group="Memory", low=2
    )
    gpu_memory_utilization: float | None = flag(
        None, "Share (0…1) of the available memory for weights and KV cache together.", group="Memory",
        low=0.01, high=1.0)  # fmt: skip
    gpu_memory: str | int | None = flag(None, "Memory of the GPU for everything, e.g. 60GiB [90 % of what is free].",
                                         group="Memory")  # fmt: skip
    block_size: int = flag(16, "Tokens in a KV block.", group="Memory", low=1, high=256)
    enable_prefix_caching: bool = flag(True, "Reuse the KV blocks of equal prefixes.", group="Memory")
    max_num_seqs: int = flag(256, "Sequences running at once.", group="Scheduling", low=1, high=65536)
    max_num_batched_tokens: int = flag(2048, "Tokens computed in a step.", group="Scheduling", low=1)
    max_queue: int = flag(1024, "Requests that may wait; one more is refused.", group="Scheduling", low=0)
    gate: str = flag("continuous", "When sequences may join the batch.", group="Scheduling", choices=GATES)
    order: str = flag("fcfs", "Who is admitted first.", group="Scheduling", choices=ORDERS)
    enable_chunked_prefill: bool = flag(True, "Split long prompts over steps.", group="Scheduling")
    dynamic_max_wait_ms: float = flag(50.0, "Dynamic gate: a batch starts when full, or after this many "
                                       "milliseconds.", group="Scheduling", low=0.0)  # fmt: skip
    device: str = flag("auto", "Where the model runs; auto is a GPU that can, else the CPU. interpret: a GPU's "
                        "kernels in Triton's interpreter, for tests.", group="Execution", choices=DEVICES)  # fmt: skip
    batch_invariant: bool = flag(False, "On a GPU: tokens do not depend on the batch, as on a CPU; slower.",
                                  group="Execution")  # fmt: skip
    threads: int | None = flag(None, "Compute threads [physical cores].", group="Execution", low=1, high=1024)
    cpu_isa: str = flag("auto", "Level of the native kernels; reference: torch alone.", group="Execution",
                         choices=ISAS)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerArgs:
    """Settings of the HTTP server."""

    host: str = flag("127.0.0.1", "Address to listen on.", group="Server")
    port: int = flag(8000, "Port to listen on; 0 takes a free one.", group="Server", low=0, high=65535)
    api_key: str | None = flag(None, "Key that clients must send as a bearer token.", group="Server")
    served_model_name: str | None = flag(None, "Names of the model in the API, comma-separated [as given].",
                                          group="Server")  # fmt: skip
    chat_template: str | None = flag(
        None, "File of a Jinja chat template, instead of the model's.", group="Server"
    )
    tool_format: str = flag("auto", "How the model writes tool calls and reasoning: a name of docs/tools.md; "
                             "auto reads it from the chat template.", group="Server", choices=TOOL_FORMATS)  # fmt: skip
    admin_port: int | None = flag(None, "Port of the admin surface, see docs/admin.md; 0 takes a free one [closed].",
                                   group="Admin", low=0, high=65535)  # fmt: skip
    admin_host: str = flag("127.0.0.1", "Address of --admin-port; another than this machine's own needs --admin-key.",
                            group="Admin")  # fmt: skip
    admin_socket: str | None = flag(None, "Path of a unix socket for the admin surface, instead of a port [closed].",
                                     group="Admin")  # fmt: skip
    admin_key: str | None = flag(None, "Key for the admin surface, as a bearer token.", group="Admin")
    lenient: bool = flag(False, "Accept unknown request fields and list them in a response header.",
                          group="Server")  # fmt: skip
    cors_origins: str | None = flag(None, "Origins that browsers may call from, comma-separated; * for all.",
                                     group="Server")  # fmt: skip
    max_body_mib: int = flag(32, "Largest request body in MiB.", group="Server", low=1, high=4096)
    response_store_mib: int = flag(64, "Memory in MiB for stored answers of /v1/responses, the least recently used "
                                    "going first; 0 stores none.", group="Server", low=0, high=65536)  # fmt: skip
    slo: str | None = flag(None, "Latencies, as ttft=500ms,tpot=50ms: chunks and the running limit hold tpot; "
                            "both are counted.", group="Server")  # fmt: skip
    profile: str | None = flag(None, "File of `quire profile` for --slo [this machine, measured in a second].",
                                group="Server")  # fmt: skip
    batch_dir: str | None = flag(None, "Folder for /v1/files and /v1/batches, which a restart goes on from [none].",
                                  group="Server")  # fmt: skip
    batch_concurrency: int = flag(
        8, "Requests of batches that run at once.", group="Server", low=1, high=4096
    )
    max_file_mib: int = flag(100, "Largest uploaded file in MiB.", group="Server", low=1, high=4096)
    drain_timeout_s: float = flag(
        30.0, "Seconds that running requests get after SIGTERM.", group="Server", low=0.0
    )
    max_restarts: int = flag(
        3, "Restarts of a crashed engine before the server gives up.", group="Server", low=0
    )
    log_level: str = flag("info", "How much is logged.", group="Server",
                           choices=("debug", "info", "warning", "error"))  # fmt: skip
    log_format: str = flag("human", "Log lines for people, or one JSON object a line.", group="Server",
                            choices=("human", "json"))  # fmt: skip
    otlp_traces_endpoint: str | None = flag(None, "OTLP/HTTP URL that gets the spans of each request, as "
                                             "http://localhost:4318/v1/traces (extra otel) [none].",
                                             group="Server")  # fmt: skip


Args = TypeVar("Args", bound="DataclassInstance")


def flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


def defaults(kind: type[Args]) -> dict[str, Any]:
    """Return key → default of every setting of ``kind``."""
    assert all(f.default is not MISSING for f in fields(kind))
    return {f.name: f.default for f in fields(kind)}


def make_args(kind: type[Args], values: Mapping[str, Any], *, origin: str) -> Args:
    """Build ``kind`` from key → value, checked for names, types, ranges and choices.

    Raises:
        ConfigError: names ``origin`` ("flag", a TOML file …), the key, the value and what is allowed.
    """
    known = {f.name: f for f in fields(kind)}
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{origin}: unknown setting {key!r}{nearest(key, known)}")
        _check(known[key], hints[key], value, origin)
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def _check(spec: Field[Any], hint: Any, value: Any, origin: str) -> None:
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{origin}: {spec.name} = {value!r} must be a list of texts")
        return
    allowed_types = getattr(hint, "__args__", (hint,))
    if isinstance(value, int) and not isinstance(value, bool) and float in allowed_types:
        value = float(value)
    if not any(type(value) is t for t in allowed_types):
        names = " or ".join("nothing" if t is type(None) else t.__name__ for t in allowed_types)
        raise ConfigError(f"{origin}: {spec.name} = {value!r} must be of type {names}")
    choices, low, high = spec.metadata["choices"], spec.metadata["low"], spec.metadata["high"]
    if choices and value not in choices:
        raise ConfigError(f"{origin}: {spec.name} = {value!r} must be one of {', '.join(choices)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if low is not None and value < low:
            raise ConfigError(f"{origin}: {spec.name} = {value!r} must be at least {low}")
        if high is not None and value > high:
            raise ConfigError(f"{origin}: {spec.name} = {value!r} must be at most {high}")
