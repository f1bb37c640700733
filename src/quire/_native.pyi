"""Types of the native extension (csrc/bindings.cpp). Addresses are `Tensor.data_ptr()`; callers check shapes."""

def cpu_features() -> dict[str, bool]: ...
def best_isa() -> str: ...
def has_isa(isa: str) -> bool: ...
def packed_elements(type: str, n: int, k: int) -> int: ...
def pack(num_threads: int, type: str, w: int, count: int, k: int, first: int, packed: int) -> None: ...
def linear(
    num_threads: int,
    isa: str,
    type: str,
    x: int,
    x_stride: int,
    packed: int,
    bias: int,
    y: int,
    y_stride: int,
    y_type: str,
    rows: int,
    n: int,
    k: int,
) -> None: ...
def rms_norm(
    num_threads: int,
    isa: str,
    bf16: bool,
    x: int,
    token_stride: int,
    head_stride: int,
    residual: int,
    residual_stride: int,
    weight: int,
    weight_stride: int,
    eps: float,
    y: int,
    sum: int,
    tokens: int,
    heads: int,
    size: int,
) -> None: ...
def gated(
    num_threads: int,
    isa: str,
    bf16: bool,
    gate: int,
    gate_up: int,
    stride: int,
    y: int,
    tokens: int,
    size: int,
) -> None: ...
def rope(
    num_threads: int,
    isa: str,
    bf16: bool,
    interleaved: bool,
    x: int,
    token_stride: int,
    head_stride: int,
    cos: int,
    sin: int,
    y: int,
    tokens: int,
    heads: int,
    head_dim: int,
    half: int,
) -> None: ...
def store_kv(
    num_threads: int,
    isa: str,
    bf16: bool,
    pieces_bf16: bool,
    tiles: bool,
    int8: bool,
    k: int,
    k_token_stride: int,
    k_head_stride: int,
    v: int,
    v_token_stride: int,
    v_head_stride: int,
    pieces: int,
    block_stride: int,
    piece_stride: int,
    block_ids: int,
    offsets: int,
    tokens: int,
    heads: int,
    head_dim: int,
    v_head_dim: int,
    block_size: int,
) -> None: ...
def rope_store(
    num_threads: int,
    isa: str,
    bf16: bool,
    pieces_bf16: bool,
    tiles: bool,
    int8: bool,
    interleaved: bool,
    qkv: int,
    stride: int,
    cos: int,
    sin: int,
    half: int,
    q_weight: int,
    k_weight: int,
    norm_all: bool,
    eps: float,
    q: int,
    pieces: int,
    block_stride: int,
    piece_stride: int,
    block_ids: int,
    offsets: int,
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    block_size: int,
) -> None: ...
def attention(
    num_threads: int,
    isa: str,
    q_bf16: bool,
    kv_bf16: bool,
    tiles: bool,
    int8: bool,
    q: int,
    q_stride: int,
    pieces: int,
    block_stride: int,
    piece_stride: int,
    sinks: int,
    y: int,
    cu_seqlens_q: int,
    seq_lens: int,
    block_table: int,
    extents: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    block_size: int,
    window: int,
    scale: float,
    cap: float,
    v_in_k: bool,
) -> None: ...
def gather(
    num_threads: int, isa: str, bf16: bool, table: int, stride: int, ids: int, y: int, rows: int, size: int
) -> None: ...
def add_rows(
    num_threads: int,
    isa: str,
    bf16: bool,
    x: int,
    stride: int,
    other: int,
    other_stride: int,
    y: int,
    rows: int,
    size: int,
) -> None: ...
def scale_rows(
    num_threads: int,
    isa: str,
    bf16: bool,
    x: int,
    stride: int,
    scale: float,
    cap: float,
    y: int,
    rows: int,
    size: int,
) -> None: ...

sample_row_bytes: int

def sample(
    num_threads: int,
    isa: str,
    logits: int,
    columns: int,
    rows: int,
    vocab: int,
    purpose: int,
    ids: int,
    best: int,
) -> None: ...
def logprobs(
    num_threads: int,
    isa: str,
    logits: int,
    chosen: int,
    num_top: int,
    rows: int,
    vocab: int,
    width: int,
    logprobs: int,
    ranks: int,
    top_ids: int,
    top_logprobs: int,
) -> None: ...

class Tape:
    def __init__(self) -> None: ...
    def start(self, tokens: int, logits: int) -> None: ...
    def stop(self) -> None: ...
    def run(self, num_threads: int, tokens: int, logits: int) -> None: ...
    def run_timed(self, num_threads: int, tokens: int, logits: int) -> list[tuple[str, float]]: ...
    def __len__(self) -> int: ...

def dot_probes() -> list[str]: ...
def probe_dot(num_threads: int, instruction: str, passes: int) -> float: ...
def probe_read(num_threads: int, num_bytes: int, passes: int) -> float: ...
def add_lora(
    num_threads: int,
    isa: str,
    bf16: bool,
    x: int,
    x_stride: int,
    y: int,
    y_stride: int,
    h: int,
    a: int,
    b: int,
    order: int,
    starts: int,
    ranks: int,
    scales: int,
    rows: int,
    k: int,
    num_slots: int,
    num_parts: int,
    max_rank: int,
    widths: tuple[int, ...],
) -> None: ...
