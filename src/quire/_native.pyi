"""Types of the native extension (csrc/bindings.cpp). Addresses are `Tensor.data_ptr()`; callers check shapes.

Functions are in the order of csrc/bindings.cpp, with the names of the parameters there, which are positional.
"""

from collections.abc import Sequence

sample_row_bytes: int

def cpu_features() -> dict[str, bool]: ...
def best_isa() -> str: ...
def has_isa(isa: str, /) -> bool: ...
def place_threads(cpus: list[int], /) -> None: ...
def checksum(address: int, size: int, /) -> int: ...
def crc32(data: bytes | bytearray | memoryview, value: int = 0, bits: int = 512, /) -> int: ...
def packed_elements(type: str, n: int, k: int, /) -> int: ...
def pack(num_threads: int, type: str, w: int, count: int, k: int, first: int, packed: int, /) -> None: ...
def linear(
    num_threads: int, isa: str, type: str, x: int, x_stride: int, packed: int, bias: int, y: int, y_stride: int,
    y_type: str, rows: int, n: int, k: int, /,
) -> None: ...  # fmt: skip
def quantized_panel_bytes(form: int, group: int, has_offset: bool, k: int, /) -> int: ...
def pack_quantized(
    num_threads: int, form: int, group: int, has_offset: bool, q: int, scale: int, offset: int, outer_scale: int,
    outer_offset: int, count: int, k: int, first: int, packed: int, /,
) -> None: ...  # fmt: skip
def quantize_weights(
    num_threads: int, isa: str, bits: int, group: int, bf16: bool, w: int, stride: int, rows: int, k: int,
    rotation: int, q: int, scale: int, multiplier: int, /,
) -> None: ...  # fmt: skip
def quantize_rows(
    num_threads: int, isa: str, bf16: bool, x: int, x_stride: int, rows: int, k: int, q: int, stride: int,
    scale: int, sums: int, group: int, rotation: int, block: int, /,
) -> None: ...  # fmt: skip
def quantized_linear(
    num_threads: int, isa: str, form: int, group: int, has_offset: bool, q: int, stride: int, x_scale: int,
    sums: int, packed: int, scale: int, offset: int, bias: int, bf16: bool, y: int, y_stride: int, rows: int,
    n: int, k: int, /,
) -> None: ...  # fmt: skip
def take_quantized_rows(
    num_threads: int, isa: str, form: int, group: int, has_offset: bool, rotation: int, packed: int, scale: int,
    offset: int, ids: int, bf16: bool, y: int, rows: int, k: int, /,
) -> None: ...  # fmt: skip
def rms_norm(
    num_threads: int, isa: str, bf16: bool, x: int, token_stride: int, head_stride: int, residual: int,
    residual_stride: int, residual_bf16: bool, sum_bf16: bool, weight: int, weight_stride: int, eps: float, y: int,
    sum: int, tokens: int, heads: int, size: int, q: int, q_stride: int, scale: int, sums: int, group: int,
    rotation: int, block: int, /,
) -> None: ...  # fmt: skip
def layer_norm(
    num_threads: int, isa: str, bf16: bool, x: int, stride: int, residual: int, residual_stride: int,
    residual_bf16: bool, sum_bf16: bool, weight: int, eps: float, y: int, sum: int, tokens: int, size: int, /,
) -> None: ...  # fmt: skip
def gated(
    num_threads: int, isa: str, bf16: bool, gate: int, gate_up: int, stride: int, y: int, tokens: int,
    size: int, gate_scale: float, alpha_p: float, alpha_n: float, q: int, q_stride: int, scale: int, sums: int,
    group: int, rotation: int, block: int, /,
) -> None: ...  # fmt: skip
def rope(
    num_threads: int, isa: str, bf16: bool, interleaved: bool, x: int, token_stride: int, head_stride: int,
    cos: int, sin: int, y: int, tokens: int, heads: int, head_dim: int, half: int, /,
) -> None: ...  # fmt: skip
def store_kv(
    num_threads: int, isa: str, bf16: bool, pieces_bf16: bool, tiles: bool, k_bits: int, v_bits: int,
    k_factors: int, k: int, k_token_stride: int, k_head_stride: int, v: int, v_token_stride: int,
    v_head_stride: int, pieces: int, block_stride: int, piece_stride: int, block_ids: int, offsets: int,
    tokens: int, heads: int, head_dim: int, v_head_dim: int, block_size: int, /,
) -> None: ...  # fmt: skip
def rope_store(
    num_threads: int, isa: str, bf16: bool, pieces_bf16: bool, tiles: bool, k_bits: int, v_bits: int,
    k_factors: int, interleaved: bool, qkv: int, stride: int, cos: int, sin: int, half: int,
    q_weight: int, k_weight: int, norm_all: bool, eps: float, q: int, pieces: int, block_stride: int,
    piece_stride: int, block_ids: int, offsets: int, tokens: int, num_heads: int, num_kv_heads: int,
    head_dim: int, v_head_dim: int, block_size: int, /,
) -> None: ...  # fmt: skip
def attention(
    num_threads: int, isa: str, q_bf16: bool, kv_bf16: bool, tiles: bool, k_bits: int, v_bits: int,
    q_factors: int, q: int, q_stride: int, pieces: int, block_stride: int, piece_stride: int, sinks: int,
    y: int, cu_seqlens_q: int, seq_lens: int, block_table: int, extents: int, num_heads: int,
    num_kv_heads: int, head_dim: int, v_head_dim: int, block_size: int, window: int, scale: float,
    cap: float, v_in_k: bool, stripe_index: int, stripe_count: int, partial: bool, /,
) -> None: ...  # fmt: skip
def merge_attention(
    num_threads: int, isa: str, bf16: bool, parts: int, sinks: int, y: int, tokens: int, ranks: int, num_heads: int,
    v_head_dim: int, /,
) -> None: ...  # fmt: skip
def gather(
    num_threads: int, isa: str, bf16: bool, table: int, stride: int, ids: int, y: int, rows: int, size: int, /,
) -> None: ...  # fmt: skip
def add_rows(
    num_threads: int, isa: str, bf16: bool, x_bf16: bool, x: int, stride: int, other: int, other_stride: int, y: int,
    rows: int, size: int, /,
) -> None: ...  # fmt: skip
def scale_rows(
    num_threads: int, isa: str, bf16: bool, x: int, stride: int, scale: float, cap: float, y: int, rows: int,
    size: int, /,
) -> None: ...  # fmt: skip
def copy_heads(
    num_threads: int, isa: str, bf16: bool, x: int, x_token_stride: int, x_head_stride: int, y: int,
    y_token_stride: int, y_head_stride: int, tokens: int, heads: int, size: int, /,
) -> None: ...  # fmt: skip
def widen_rows(
    num_threads: int, isa: str, bf16: bool, x: int, stride: int, y: int, rows: int, size: int, /,
) -> None: ...  # fmt: skip
def add_gated_rows(
    num_threads: int, isa: str, bf16: bool, x: int, stride: int, other: int, other_stride: int, gate: int,
    gate_stride: int, y: int, rows: int, size: int, /,
) -> None: ...  # fmt: skip
def gate_rows(
    num_threads: int, isa: str, bf16: bool, x: int, stride: int, gate: int, gate_stride: int, y: int, rows: int,
    size: int, per: int, plain: bool, /,
) -> None: ...  # fmt: skip
def causal_conv(
    num_threads: int, isa: str, bf16: bool, x: int, stride: int, before: int, after: int, weight: int, bias: int,
    past: int, slot_stride: int, y: int, cu_seqlens: int, slots: int, fresh: int, saves: int, extents: int, tokens: int,
    channels: int, kernel: int, /,
) -> None: ...  # fmt: skip
def delta_inputs(
    num_threads: int, isa: str, bf16: bool, qkv: int, stride: int, a: int, a_stride: int, b: int, b_stride: int,
    rate: int, dt_bias: int, qk: int, gates: int, tokens: int, k_heads: int, v_heads: int, k_dim: int, eps: float, /,
) -> None: ...  # fmt: skip
def channel_inputs(
    num_threads: int, isa: str, bf16: bool, qkv: int, stride: int, f: int, f_stride: int, b: int, b_stride: int,
    rate: int, dt_bias: int, qkd: int, beta: int, tokens: int, heads: int, k_dim: int, eps: float, bounded: bool,
    floor: float, /,
) -> None: ...  # fmt: skip
def mamba_inputs(
    num_threads: int, isa: str, bf16: bool, xbc: int, stride: int, dt: int, dt_stride: int, rate: int, dt_bias: int,
    qk: int, gates: int, tokens: int, groups: int, heads: int, k_dim: int, width: int, scale: float, least: float,
    most: float, /,
) -> None: ...  # fmt: skip
def gated_delta_rule(
    num_threads: int, isa: str, bf16: bool, qk: int, gates: int, skip: int, v: int, stride: int, state: int,
    slot_stride: int, y: int, cu_seqlens: int, slots: int, fresh: int, saves: int, extents: int, tokens: int,
    k_heads: int, v_heads: int, k_dim: int, v_dim: int, parts: int, /,
) -> None: ...  # fmt: skip
def gated_norm(
    num_threads: int, isa: str, bf16: bool, x: int, x_stride: int, z: int, z_stride: int, weight: int, y: int,
    tokens: int, heads: int, size: int, eps: float, plain: bool, /,
) -> None: ...  # fmt: skip
def group_norm(
    num_threads: int, isa: str, bf16: bool, x: int, x_stride: int, z: int, z_stride: int, weight: int, y: int,
    tokens: int, groups: int, size: int, eps: float, scale: float, gate_first: bool, /,
) -> None: ...  # fmt: skip
def sample(
    num_threads: int, isa: str, logits: int, stride: int, edited: Sequence[tuple[int, int]], columns: int, rows: int,
    vocab: int, purpose: int, ids: int, best: int, /,
) -> None: ...  # fmt: skip
def logprobs(
    num_threads: int, isa: str, logits: int, chosen: int, num_top: int, rows: int, vocab: int, width: int,
    logprobs: int, ranks: int, top_ids: int, top_logprobs: int, /,
) -> None: ...  # fmt: skip
def route(
    num_threads: int, logits: int, correction: int, scoring: int, tokens: int, num_experts: int, top_k: int,
    groups: int, top_groups: int, group_by_two: bool, normalize: bool, scale: float, weights: int, ids: int,
    factors: int, /,
) -> None: ...  # fmt: skip
def experts_scratch_bytes(
    type: str, tokens: int, hidden: int, inter: int, slots: int, top_k: int, up: tuple[int, int, bool,
    int, int], down: tuple[int, int, bool, int, int], places: tuple[Channel, int, int, int, int] | None, /,
) -> int: ...  # fmt: skip
def experts(
    num_threads: int, isa: str, type: str, x: int, x_stride: int, weights: int, ids: int, gate_up: int,
    down: int, gate: int, y: int, scratch: int, tokens: int, hidden: int, inter: int, slots: int, top_k: int,
    up: tuple[int, int, bool, int, int], down_format: tuple[int, int, bool, int, int],
    places: tuple[Channel, int, int, int, int] | None, /,
) -> None: ...  # fmt: skip
def add_lora(
    num_threads: int, isa: str, bf16: bool, x: int, x_stride: int, y: int, y_stride: int, h: int, a: int,
    b: int, order: int, starts: int, ranks: int, scales: int, gained: int, gains: int, offsets: int, rows: int, k: int,
    num_slots: int, num_parts: int, max_rank: int, widths: Sequence[int], /,
) -> None: ...  # fmt: skip
def dot_probes() -> list[str]: ...
def probe_dot(num_threads: int, instruction: str, passes: int, /) -> float: ...
def probe_read(num_threads: int, num_bytes: int, passes: int, /) -> float: ...

class Channel:
    """A group of ranks that share a segment of memory."""

    def __init__(
        self, abort_word: int, lanes: Sequence[int], slots: Sequence[int], ranks: Sequence[int], index: int,
        slot_bytes: int, limit_s: float,
    ) -> None: ...  # fmt: skip
    @property
    def bytes_sent(self) -> int: ...

LANE_BYTES: int

def collective(
    num_threads: int, channel: Channel, what: int, x: int, x_stride: int, from_bf16: bool, y: int, y_stride: int,
    to_bf16: bool, rows: int, inputs: int, outputs: int, begins: int = 0, /,
) -> None: ...  # fmt: skip
def gather_parts(num_threads: int, channel: Channel, y: int, begins: Sequence[int], /) -> None: ...
def local_ids(
    num_threads: int, ids: int, y: int, rows: int, begin: int, end: int, other: int, /
) -> None: ...  # fmt: skip

class Tape:
    """The native calls of a step, recorded once and replayed for every step."""

    def __init__(self) -> None: ...
    def start(self, tokens: int, logits: int) -> None: ...
    def stop(self) -> None: ...
    def run(self, num_threads: int, tokens: int, logits: int) -> None: ...
    def run_timed(self, num_threads: int, tokens: int, logits: int) -> list[tuple[str, float]]: ...
    def __len__(self) -> int: ...

class DraftChain:
    """Drafts one after another: recorded steps with sampling between them."""

    def __init__(
        self, tape: Tape, isa: str, step: Sequence[int], max_tokens: int, max_blocks: int, block_size: int,
        lag: int, logits: int, vocab: int, draft_vocab: int, ids: int, slots: int, found: int, hidden: int,
        row_bytes: int, /,
    ) -> None: ...  # fmt: skip
    def run(
        self, num_threads: int, token_ids: int, max_tokens: int, block_table: int, max_blocks: int, columns: int,
        chains: int, num: int, spread: int, drafts: int, /,
    ) -> None: ...  # fmt: skip
