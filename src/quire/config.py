"""Frozen configurations. Built once, by `quire.resolve.resolve`; no object edits its config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from quire.families.head_spec import HeadSpec
from quire.kv_layout import KvLayout
from quire.modelspec import ModelSpec
from quire.parallel.topology import Topology
from quire.request import Adapter
from quire.weight_format import WeightFormat

GateKind = Literal["static", "dynamic", "continuous"]
OrderKind = Literal["fcfs", "priority", "shortest-first", "longest-prefix", "deadline", "fair"]
MAX_DRAFTS = 32  # per sequence and step
MAX_DRAFT_PATHS = 16  # per tree of drafts
AUTO_DRAFTS = 8  # the most of them where the engine chooses
GATES: tuple[GateKind, ...] = get_args(GateKind)
ORDERS: tuple[OrderKind, ...] = get_args(OrderKind)
MIN_PACKED_BYTES = 128 << 20  # smallest packed weights that are cached by default
# Each level includes the previous ones.
X86_LEVELS = ("scalar", "avx2", "avx512_bw", "avx512_vnni", "avx512", "amx")
ARM_LEVELS = ("scalar", "neon", "neon_i8mm")
# Rows that the linears of `RunnerConfig.kernels` compute together; those of the vector levels divide 12.
ROW_TILES = {"reference": 32, "amx": 16, "triton": 16, "invariant": 16}


def row_tile(kernels: str) -> int:
    """Return the rows that linears compute together. ``kernels``: as `RunnerConfig.kernels`."""
    return ROW_TILES.get(kernels, 12)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The machine as found once, before `resolve`."""

    # interpret: the kernels of a GPU in Triton's interpreter, on the CPU
    kind: Literal["cpu", "cuda", "interpret"]
    name: str  # "AMD EPYC (2 cores)"
    num_cores: int  # physical cores this process may use
    memory_total_bytes: int
    memory_available_bytes: int  # min(MemAvailable, rest of the cgroup's limit)
    isa: str = "scalar"  # CPU: its best level in kernels/registry.py
    native: bool = False  # the native extension is importable
    capability: tuple[int, int] = (0, 0)  # GPU: compute capability
    num_nodes: int = 1  # memory nodes (NUMA) with cores that this process may use

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of the native kernels that this CPU runs, the fastest last."""
        for ladder in (X86_LEVELS, ARM_LEVELS):
            if self.isa in ladder:
                return ladder[: ladder.index(self.isa) + 1]
        return ("scalar",)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The block pool, in blocks, never in bytes. ``windows`` has one entry per cache group (None: full)."""

    num_blocks: int
    block_size: int = 16  # tokens, over all ranks that share a sequence's cache
    windows: tuple[int | None, ...] = (None,)
    enable_prefix_caching: bool = True
    model_key: str = ""  # enters every block hash: model, dtype, quantization
    has_events: bool = False  # gateways are told which blocks there are
    num_states: int = 0  # recurrent states of running sequences at most
    num_checkpoints: int = 0  # slots beyond them; 0: prefixes are not reused
    num_draft_states: int = 0  # slots beyond those: drafts per step at most
    state_bytes: int = 0  # per slot
    # The address and bytes that peers share, with an engine id; a folder and bytes; a Redis server's URL and 0.
    tiers: tuple[tuple[str, int], ...] = ()
    peers: tuple[str, ...] = ()  # HOST:PORT of each
    engine_id: str = ""  # its name among peers

    @property
    def num_state_slots(self) -> int:
        """Slots for recurrent states in all."""
        return self.num_states + self.num_checkpoints + self.num_draft_states


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The slots for LoRA adapters."""

    max_loras: int  # slots: different adapters in one step
    max_rank: int
    adapters: tuple[Adapter, ...] = ()  # loaded from the start
    saved: tuple[str, ...] = ()  # ends of the model that an adapter may bring whole


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """gate × order × budget (docs/scheduler.md)."""

    gate: GateKind = "continuous"
    order: OrderKind = "fcfs"
    max_num_seqs: int = 256  # sequences running at once
    max_num_batched_tokens: int = 2048  # tokens per step at most
    max_model_len: int = 4096  # prompt + output of one sequence
    max_queue: int = 1024  # waiting sequences; further requests are rejected
    max_queue_tokens: int | None = None  # prompt tokens of waiting sequences; None: any number
    max_queue_bytes: int | None = None  # approximate bytes of waiting requests; None: any number
    max_ttft_s: float | None = None  # seconds; a longer predicted TTFT rejects the request
    enable_chunked_prefill: bool = True  # off: a prompt is computed in one step or waits
    # Prompts with more tokens left to compute have at most so many of a step, together; 0: as many as there are.
    long_prefill_token_threshold: int = 0
    # Dynamic gate: a batch starts when full or when its oldest waited this long.
    dynamic_max_wait_s: float = 0.05
    max_loras: int = 0  # adapters of running sequences; 0: only the base model
    max_num_drafts: int = 0  # per sequence and step at most; 0: no speculation
    adaptive_drafts: bool = False  # fewer drafts where more do not pay; False: always all
    max_draft_paths: int = 1  # paths per tree of drafts; 1: a chain


@dataclass(frozen=True, slots=True)
class PackedCacheConfig:
    """Where quantized weights are kept as they lie in memory, for the next start."""

    folder: str  # empty: that of `models.packed_file.packed_folder`
    max_bytes: int  # all files together
    min_bytes: int  # smallest file: packing a smaller model is fast anyway


def packed_cache_config(setting: str, mib: int) -> PackedCacheConfig | None:
    """Return the cache of `EngineArgs.packed_cache` and ``packed_cache_mib``."""
    if setting == "off":
        return None
    if setting == "auto":
        return PackedCacheConfig("", mib << 20, MIN_PACKED_BYTES)
    return PackedCacheConfig(setting, mib << 20, 0)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Where the model is and in which formats it is held."""

    path: str  # local folder or file, after a download from the hub
    name: str  # the name that the user gave
    spec: ModelSpec
    dtype: str  # "bfloat16" | "float32", for weights and activations
    kv_dtype: str  # "bfloat16" | "float32" | "int8"
    max_model_len: int
    load_format: Literal["auto", "safetensors", "gguf", "random"] = "auto"
    quantize: str | None = None  # the value that the user gave
    seed: int = 0  # for load_format="random"
    tokenizer: str = ""  # folder or file; read by the worker for its first grammar
    formats: dict[str, WeightFormat] = field(default_factory=dict)  # quantized weights, by canonical name
    remarks: tuple[str, ...] = ()  # deviations from the request, with their reasons
    packed_cache: PackedCacheConfig | None = None  # None: packed at every start


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """How a worker executes."""

    num_threads: int
    # Torch only; C++ on a CPU; Triton on a GPU.
    backend: Literal["reference", "native", "triton"] = "reference"
    isa: str = ""  # native kernels' level: "scalar", "avx2" … "neon_i8mm"
    batch_invariant: bool = False  # GPU: slower kernels with bits independent of the batch
    graphs: bool = True  # on a GPU: decode steps are captured and replayed
    # A server's: what the first grammar needs of the vocabulary is built after the start, while nothing runs.
    prepares_grammars: bool = False
    step_log: str | None = None  # file that gets one line per step
    profile_dir: str | None = None  # folder of profiles; None: there are none
    profile_steps: int | None = None  # profiled from the start on

    @property
    def kernels(self) -> str:
        """One word for reports: "reference", the native level, "triton" or "invariant"."""
        if self.backend == "triton":
            return "invariant" if self.batch_invariant else "triton"
        return self.isa if self.backend == "native" else "reference"


@dataclass(frozen=True, slots=True)
class SloConfig:
    """Latency targets of the running engine (`quire.scheduler.policies.slo`)."""

    cost_model: str  # `CostModel.to_json` as text
    ttft_s: float | None = None
    tpot_s: float | None = None


Determinism = Literal["exact", "batch-dependent", "distribution", "approximate"]


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """Heads that draft from the model's hidden states: Medusa, EAGLE, or the checkpoint's own MTP layer."""

    path: str  # folder of the heads, or of the model
    name: str  # the name that the user gave
    spec: HeadSpec
    dtype: str  # the model's
    load_format: Literal["auto", "safetensors", "gguf", "random"] = "auto"
    seed: int = 0  # for load_format="random"


@dataclass(frozen=True, slots=True)
class SpeculateConfig:
    """How drafts are proposed (docs/speculation.md)."""

    method: Literal["ngram", "lookahead", "draft", "medusa", "eagle", "mtp"]
    draft: ModelConfig | None = None  # with "draft"
    accept: Literal["exact", "rejection", "typical"] = "exact"  # `quire.sampling.accept`
    heads: HeadsConfig | None = None  # with "medusa", "eagle" and "mtp"
    num_branch_blocks: int = 0  # blocks beyond the cache's, for `quire.runner.branches`


@dataclass(frozen=True, slots=True)
class RecorderConfig:
    """The flight recorder (docs/metrics.md)."""

    folder: str
    num_steps: int  # kept
    with_ids: bool  # files hold token ids and grammars, so they can be replayed
    fingerprint: str  # checkpoint fingerprint
    settings: str  # `EngineArgs` as JSON


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Where Ray places the ranks."""

    address: str | None  # Ray's address; None: this machine's cluster, or a new one
    nodes: int | None  # nodes for the stages; None: Ray chooses


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """How whole experts are balanced over the ranks of the ep axis (docs/parallel.md)."""

    moves: bool  # False: their load is measured only
    step_interval: int  # steps whose tokens are counted together


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The whole configuration of an engine."""

    model: ModelConfig
    kv_layout: KvLayout
    cache: CacheConfig
    scheduler: SchedulerConfig
    runner: RunnerConfig
    device: DeviceInfo
    slo: SloConfig | None = None
    lora: LoraConfig | None = None  # None: only the base model
    speculate: SpeculateConfig | None = None  # None: one token per sequence and step
    recorder: RecorderConfig | None = None  # None: steps are not recorded
    ray: RayConfig | None = None  # None: the ranks run on this machine
    topology: Topology = field(default_factory=Topology)  # how the model is cut over ranks
    experts: ExpertsConfig | None = None  # None: every expert is on one rank, or cut over all

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model whose inputs heads read that draft (EAGLE-3)."""
        heads = None if self.speculate is None else self.speculate.heads
        return () if heads is None else heads.spec.taps

    @property
    def determinism(self) -> Determinism:
        """What tokens depend on: on the batch with a GPU's faster kernels (docs/exactness.md), and with a rule of
        acceptance that is not exact also on the drafts (docs/speculation.md).
        """
        if self.speculate is not None and self.speculate.accept != "exact":
            return "distribution" if self.speculate.accept == "rejection" else "approximate"
        return "batch-dependent" if self.runner.kernels == "triton" else "exact"
