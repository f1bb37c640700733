"""Laws of thumb as functions: ridge point, Little, Amdahl, pipeline bubble, cost of tokens; bytes on their way."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, lgamma, log, log1p, prod, sqrt

from quire.cost.cost_model import StepFeatures
from quire.cost.efficiency import IDEAL
from quire.cost.hardware import Hardware
from quire.cost.roofline import Roofline, Work
from quire.cost.split import FLOAT_BYTES, Shard, Split
from quire.modelspec import ModelSpec, weight_shapes

NVME_BANDWIDTH = 7e9  # bytes/s that a PCIe 4.0 x4 drive reads
WORDS_PER_TOKEN = 0.75  # in English text
MILLION = 1e6
SECONDS_PER_DAY = 86_400
HOURS_PER_MONTH = 365 * 24 / 12


def ridge_point(hardware: Hardware, precision: str = "bf16") -> float:
    """Return the operations per byte from which on arithmetic is the bound (Williams et al. 2009)."""
    return (hardware.rate(precision) or 0.0) / hardware.bandwidth


def matrix_roofline(hardware: Hardware, inputs: int, outputs: int, precision: str = "bf16") -> Roofline:
    """Return the step times of one matrix alone, on a device that loses nothing."""
    params = float(inputs * outputs)
    shard = Shard(params * FLOAT_BYTES[precision], params, 0.0, 0.0, 0.0, 0.0, 0.0)
    work = Work(shard, Split(), precision, 1, inputs, 1, 0.0, (), 0.0, 0.0)
    return Roofline(work, hardware, IDEAL)


@dataclass(frozen=True, slots=True)
class Intensity:
    """The work of a step on one device."""

    operations: float
    bytes: float  # read: weights, K and V
    seconds: float
    rate: float  # operations/s of the device

    @property
    def per_byte(self) -> float:
        """Arithmetic intensity."""
        return self.operations / self.bytes

    @property
    def utilization(self) -> float:
        """Share of the device's operations/s that the step uses."""
        return self.operations / self.rate / self.seconds


def intensity(roofline: Roofline, step: StepFeatures) -> Intensity:
    """Return operations and bytes of ``step`` on the fullest device, and its seconds."""
    work, shard, split = roofline.work, roofline.work.shard, roofline.work.split
    rows = step.num_tokens
    touched = 1.0 - float((1.0 - work.top_k / work.num_experts) ** rows) if work.num_experts else 0.0
    operations = 2.0 * (
        (shard.dense_params + shard.expert_params) * rows + shard.head_params * step.num_logits
    )
    operations += work.decode_flops_per_key * step.decode_kv_tokens / split.tp
    operations += work.flops_per_pair * step.chunk_pairs / split.tp
    read = shard.dense_bytes + shard.expert_bytes * touched + shard.head_bytes * bool(step.num_logits)
    read += work.kv_bytes * (step.decode_kv_tokens + step.chunk_kv_tokens) / work.kv_ways
    rate = roofline.hardware.rate(work.precision) or 1.0
    return Intensity(operations, read, roofline.seconds(step), rate)


@dataclass(frozen=True, slots=True)
class Tier:
    """A memory that a device reads from."""

    name: str
    bandwidth: float  # bytes/s
    capacity: float | None  # bytes; None: as large as one wants


def tiers(hardware: Hardware) -> list[Tier]:
    """Return the memories of ``hardware`` that the table knows, the fastest first."""
    rows = [
        ("SRAM (shared memory)", hardware.sram_bandwidth, hardware.sram_bytes),
        ("L2", hardware.l2_bandwidth, hardware.l2_bytes),
        ("device memory", hardware.bandwidth, hardware.memory_bytes),
        ("link to its neighbours", hardware.link_bandwidth, None),
        ("PCIe to the host", hardware.host_bandwidth, None),
        ("network", hardware.network_bandwidth, None),
        ("NVMe", NVME_BANDWIDTH, None),
    ]
    known = [Tier(name, speed, size) for name, speed, size in rows if speed]
    return sorted(known, key=lambda tier: -tier.bandwidth)


def transfer_s(num_bytes: float, bandwidth: float, latency_s: float = 0.0) -> float:
    """Return the seconds of ``num_bytes`` over a link."""
    return latency_s + num_bytes / bandwidth


def little(rate: float, seconds: float) -> float:
    """Return the mean number in a system: L = λ · W (Little 1961)."""
    return rate * seconds


def amdahl(parallel: float, devices: float) -> float:
    """Return the speed-up on ``devices`` where a share ``parallel`` (0…1) of the work is divided (Amdahl 1967)."""
    return 1.0 / (1.0 - parallel + parallel / devices)


def bubble(stages: int, microbatches: int) -> float:
    """Return the share of time in which a pipeline's stage waits: (p − 1) / (m + p − 1) (GPipe, arXiv:1811.06965)."""
    return (stages - 1) / (microbatches + stages - 1)


def imbalance(choices: int, bins: int) -> float:
    """Return the load of the fullest of ``bins`` over the mean, where ``choices`` fall on them evenly at random.

    The maximum of independent binomials, its deviation widened for their sum, which is fixed: √(n / (n − 1)).
    """
    if bins == 1 or choices == 0:
        return 1.0
    p = 1.0 / bins
    mean, sigma = choices * p, sqrt(choices * p * (1 - p))
    first = max(0, int(mean - 12 * sigma))
    top, below = float(first), 0.0
    for x in range(first, min(choices, int(mean + 12 * sigma) + 20)):  # P(maximum > x), summed
        ways = lgamma(choices + 1) - lgamma(x + 1) - lgamma(choices - x + 1)
        below += exp(ways + x * log(p) + (choices - x) * log1p(-p))
        top += 1.0 - min(1.0, below) ** bins
    return 1.0 + (top - mean) * sqrt(bins / (bins - 1)) / mean


def owned_per_hour(purchase_usd: float, watts: float, usd_per_kwh: float, years: float = 3.0) -> float:
    """Return USD per hour of owned devices: their price over ``years`` of running, and their power."""
    return purchase_usd / (years * 365 * 24) + watts / 1000 * usd_per_kwh


def cost_per_million(usd_per_hour: float, tokens_per_s: float) -> float:
    """Return USD per million tokens."""
    return usd_per_hour / 3600 / tokens_per_s * MILLION


def break_even(usd_per_hour: float, api_usd_per_million: float) -> float:
    """Return the tokens per day above which own devices cost less than an API."""
    return usd_per_hour * 24 / api_usd_per_million * MILLION


@dataclass(frozen=True, slots=True)
class AttentionTraffic:
    """Bytes of one layer's attention over a prompt, between the device's memory and its SRAM."""

    scores: float  # one matrix of scores, over all heads
    naive: float
    tiled: float  # K and V once per tile of queries
    # Every element once: tiled, where K and V of a head stay in the L2.
    once: float
    operations: float


def attention_traffic(
    context: int, num_heads: int, num_kv_heads: int, head_dim: int, element: int = 2, *, tile: int = 128,
    passes: int = 4,
) -> AttentionTraffic:  # fmt: skip
    """Return the traffic of naive attention, and of tiled attention (FlashAttention, arXiv:2205.14135).

    ``passes``: over the matrix of scores: written, read and written by the softmax, read for the product with V.
    ``tile``: query rows for which K and V are read once.
    """
    scores = float(num_heads) * context * context * element
    rows = context * head_dim * element
    once = 2.0 * num_heads * rows + 2.0 * num_kv_heads * rows  # Q and the output; K and V
    tiles = -(-context // tile)
    tiled = 2.0 * num_heads * rows + 2.0 * num_heads * rows * tiles
    return AttentionTraffic(
        scores, passes * scores + once, tiled, once, 4.0 * num_heads * head_dim * context * context
    )


def params_under(spec: ModelSpec, prefix: str) -> int:
    """Return the number of weights whose canonical names begin with ``prefix``, as ``layers.0.mlp.``."""
    return sum(prod(shape) for name, shape in weight_shapes(spec).items() if name.startswith(prefix))


def fewest_devices(num_bytes: float, hardware: Hardware, share: float = 1.0) -> int:
    """Return the devices whose memory, of which ``share`` is used, holds ``num_bytes``."""
    return ceil(num_bytes / (hardware.memory_bytes * share))
