"""`Roofline`: seconds of a step from what the device can do, with a handful of efficiency constants.

    seconds = linears + experts + attention + links + launches

    linears     max(2 · weights · rows / (rate · compute), bytes / (bandwidth · memory)); output matrix: sampled rows
    experts     the same for the experts that ``rows`` rows touch: E · (1 − (1 − k/E)^rows)
    attention   K and V read, and recurrent states read and written / (bandwidth · kv_memory)
                + 4 · head_dim · heads · pairs / (bf16 rate · attention)
    links       the collectives of `parallel.traffic`, by measured times or by the bandwidth of the table; between
                machines with CPUs, over Gloo
    launches    a constant per layer, one per sequence, and one per step

The roofline is Williams et al. 2009. The constants are data (`quire.cost.efficiency`). A roofline is a `StepTime`,
which the simulator takes in place of a profile, and `sampled` makes it a `CostModel`, with which ``serve --slo`` starts
where it has no profile.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil

from quire.cost.cost_model import CostModel, Curve, StepFeatures
from quire.cost.efficiency import Efficiency
from quire.cost.hardware import Hardware
from quire.cost.links import Links, network_seconds, seconds_of
from quire.cost.ranks import cuts_rows
from quire.cost.split import KV_DTYPES, Shard, Split, Stored, shard_of
from quire.modelspec import DTYPE_BYTES, ModelSpec
from quire.parallel.shard import shard
from quire.parallel.stripe import DIVIDE_FROM
from quire.parallel.topology import Axis, Rank, Topology
from quire.parallel.traffic import Transport, Use, dispatches, uses

DEFAULT_LINK = 16e9  # bytes/s where the table has no figure: PCIe 3.0 x16


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step by cause; ``bound`` is the roof that limits the linears."""

    linears: float
    experts: float
    attention: float
    links: float
    launches: float
    bound: str  # "compute" | "memory"

    @property
    def seconds(self) -> float:
        return self.linears + self.experts + self.attention + self.links + self.launches


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one device for a step, in bytes and operations; `decoder_work` reads it from a `ModelSpec`."""

    shard: Shard
    split: Split
    precision: str
    num_layers: int
    hidden_size: int
    kv_ways: int  # parts that a token's K and V are cut into; MLA: one
    kv_bytes: float  # per cached token, in the layers without a window
    windows: tuple[tuple[int, float], ...]  # (window, bytes) of the layers with a window
    flops_per_pair: float  # per (query, key) of a chunk, in layers without a window
    decode_flops_per_key: float  # per key of a decode; MLA: on the latent itself
    num_moe_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    state_bytes: int = 0  # per sequence, in recurrent layers
    spec: ModelSpec | None = None  # None: one device


def decoder_work(
    spec: ModelSpec, precision: str = "bf16", kv_dtype: str = "bf16", split: Split | None = None,
    stored: Stored | None = None,
) -> Work:  # fmt: skip
    """Return the work of one device in a replica of ``spec`` under ``split``.

    ``stored``: the formats of weights that a file holds rounded; products are still timed as of ``precision``.
    """
    split = split or Split()
    windows: dict[int, float] = {}
    kv_bytes = flops = decode_flops = 0.0
    for a in spec.attentions:
        size = a.kv_elements_per_token * DTYPE_BYTES[KV_DTYPES[kv_dtype]]
        if a.window is None:
            kv_bytes += size
            flops += 2 * a.num_heads * (a.head_dim + a.v_head_dim)
            latent = a.kv_elements_per_token + a.kv_lora_rank if a.is_mla else a.head_dim + a.v_head_dim
            decode_flops += 2 * a.num_heads * latent
        else:
            windows[a.window] = windows.get(a.window, 0.0) + size
    heads = min(1 if a.is_mla else a.num_kv_heads for a in spec.attentions)
    moe = [layer.mlp.moe for layer in spec.layers if layer.mlp.moe is not None]
    return Work(
        shard=shard_of(spec, precision, split, stored),
        split=split,
        precision=precision,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        kv_ways=min(split.tp, heads),
        kv_bytes=kv_bytes,
        windows=tuple(windows.items()),
        flops_per_pair=flops,
        decode_flops_per_key=decode_flops,
        num_moe_layers=len(moe),
        num_experts=moe[0].num_experts if moe else 0,
        top_k=moe[0].top_k if moe else 0,
        state_bytes=spec.state_bytes_per_sequence,
        spec=spec,
    )


@lru_cache(maxsize=512)
def split_uses(spec: ModelSpec, split: Split, is_cpu: bool, layout: str = "auto") -> tuple[Use, ...]:
    """Return the collectives of a step on the first rank of each stage, of all stages; ``layout``: of CPUs."""
    if split.attention_dp > 1:
        return dispatches(spec, split.ep, "bfloat16")
    # On a GPU all ranks of whole experts add up their parts of a token, as with cut ones.
    rows = is_cpu and (split.ep > 1 or cuts_rows(layout, spec))
    topology = Topology(tp=1 if rows else split.tp, ep=split.tp if rows else 1, pp=split.pp, cp=split.cp)
    counts: Counter[Use] = Counter()
    for stage in range(split.pp):
        for use in uses(shard(spec, topology, topology.rank_of(Rank(pp=stage))), "bfloat16"):
            axis: Axis = "tp" if use.axis == "ep" and split.ep == 1 else use.axis  # rows of dense models
            counts[replace(use, count=1, axis=axis)] += use.count
    return tuple(replace(use, count=count) for use, count in counts.items())


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Equal collectives of a step, over all stages."""

    use: Use
    num_bytes: float  # bytes sent per device and collective
    seconds: float  # per collective
    speed: float | None  # bytes/s of the table; None: measured times
    transport: Transport

    @property
    def total_bytes(self) -> float:
        return self.use.count * self.num_bytes


@dataclass(frozen=True, slots=True)
class Roofline:
    """Step times of one replica on ``hardware``. ``links``: measured times of its collectives between CPUs.

    ``layout``: of tensor parallelism between CPUs, as `EngineArgs.tensor_parallel_layout`.
    """

    work: Work
    hardware: Hardware
    efficiency: Efficiency
    links: Links | None = None
    layout: str = "auto"
    uses: tuple[Use, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spec, split = self.work.spec, self.work.split
        is_cpu = self.hardware.kind == "cpu"
        object.__setattr__(self, "uses", () if spec is None else split_uses(spec, split, is_cpu, self.layout))

    def seconds(self, step: StepFeatures) -> float:
        """Return the seconds of ``step`` from its first stage to its last."""
        return self.parts(step).seconds if step.num_tokens else 0.0

    def stage_seconds(self, step: StepFeatures) -> tuple[float, ...]:
        """Return the seconds of ``step`` on each stage, which take about as long as each other."""
        stages = self.work.split.pp
        return (self.seconds(step) / stages,) * stages

    def parts(self, step: StepFeatures) -> StepParts:
        """Return the seconds of ``step`` by cause."""
        e, hw, shard, split = self.efficiency, self.hardware, self.work.shard, self.work.split
        rows = step.num_tokens / split.attention_dp  # tokens of one device's attention
        rate = (hw.rate(self.work.precision) or 0.0) * e.share(rows)
        bandwidth = hw.bandwidth * e.memory
        divided = rows / split.cp if rows >= DIVIDE_FROM * split.cp else rows
        compute_s = 2 * (shard.dense_params * divided) / rate if rate else 0.0
        memory_s = shard.dense_bytes / bandwidth
        head_rows = step.num_logits / split.attention_dp
        bf16 = (hw.rate("bf16") or 0.0) * e.share(head_rows)
        head_s = max(
            2 * shard.head_params * head_rows / bf16 if bf16 else 0.0,
            shard.head_bytes / bandwidth if head_rows else 0.0,
        )
        return StepParts(
            linears=split.pp * max(compute_s, memory_s) + head_s,
            experts=split.pp * self._experts(step.num_tokens, rate, bandwidth),
            attention=self._attention(step),
            links=sum(link.use.count * link.seconds for link in self.link_uses(rows, head_rows)),
            launches=self.work.num_layers * e.layer_s
            + e.step_s
            + e.seq_s * step.num_seqs / split.attention_dp,
            bound="compute" if compute_s > memory_s else "memory",
        )

    def _experts(self, rows: float, rate: float, bandwidth: float) -> float:
        work, shard, e = self.work, self.work.shard, self.efficiency
        if not work.num_experts:
            return 0.0
        touched = 1.0 - float((1.0 - work.top_k / work.num_experts) ** rows)
        compute_s = 2 * shard.expert_params * rows / (rate * e.experts) if rate else 0.0
        return max(compute_s, shard.expert_bytes * touched / (bandwidth * e.expert_memory))

    def _attention(self, step: StepFeatures) -> float:
        """Return the seconds of reading K, V and states, and of the chunks' products. Windows cut the mean context."""
        work, split = self.work, self.work.split
        rate = (self.hardware.rate("bf16") or 0.0) * self.efficiency.attention
        bandwidth = self.hardware.bandwidth * self.efficiency.kv_memory
        ways = split.tp * split.attention_dp * split.cp
        num_decodes = max(1, step.num_seqs if not step.chunk_pairs else step.num_seqs - 1)
        mean = step.decode_kv_tokens / num_decodes
        read = work.kv_bytes * (step.decode_kv_tokens + step.chunk_kv_tokens)
        read += sum(
            size * (min(mean, w) * num_decodes + min(step.chunk_kv_tokens, w)) for w, size in work.windows
        )
        # Each state is read and written once, and once more behind each draft, to go back to.
        read += work.state_bytes * (step.num_seqs + max(step.num_seqs, step.num_logits))
        read_s = read / (work.kv_ways * split.attention_dp * split.cp) / bandwidth
        if not rate:
            return read_s
        decode_s = work.decode_flops_per_key * (step.decode_kv_tokens + step.draft_pairs) / ways / rate
        return max(read_s, decode_s) + work.flops_per_pair * step.chunk_pairs / ways / rate

    def link_uses(self, rows: float, logits: float) -> list[LinkUse]:
        """Return the collectives of a step with ``rows`` tokens, of which ``logits`` sample, on one device."""
        num_tokens, num_logits = ceil(rows), ceil(logits)
        network = self.hardware.network_bandwidth
        link_uses = []
        for use in self.uses:
            if not use.num_rows(num_tokens, num_logits):
                continue
            transport: Transport = "ring" if self.hardware.kind != "cpu" else "shared"
            if transport == "shared" and network and self._is_wide(use):
                transport = "gloo"
            moved, speed = use.sent(num_tokens, num_logits, transport), None
            if transport == "gloo":
                assert network is not None
                seconds = network_seconds(use, moved, self.links or {}, network)
            elif self.links is not None and use.kind in self.links:
                seconds = seconds_of(use, self.links, num_tokens, num_logits)
            else:
                speed = self._link(use)
                seconds = self.efficiency.link_s + moved / (speed * self.efficiency.link)
            link_uses.append(LinkUse(use, moved, seconds, speed, transport))
        return link_uses

    def _is_wide(self, use: Use) -> bool:
        """Whether the devices of an axis are in several domains."""
        split = self.work.split
        spans = {"tp": split.tp, "ep": max(split.tp, split.ep), "cp": split.tp * split.cp}
        return spans.get(use.axis, split.tp * split.cp * split.pp) > self.hardware.domain

    def _link(self, use: Use) -> float:
        """Return the bytes/s between the devices of an axis: of the network where they span several domains."""
        hw = self.hardware
        return (hw.network_bandwidth if self._is_wide(use) else hw.link_bandwidth) or DEFAULT_LINK


_KEYS = 1_000_000


def sampled(roofline: Roofline, max_tokens: int) -> CostModel:
    """Return a cost model that agrees with ``roofline`` at powers of 2 of tokens up to ``max_tokens``, without K and V.

    Rows and logits are not told apart: a step samples from each of few rows or from one of many, and reads the output
    matrix once either way.
    """
    one = roofline.seconds(StepFeatures(1, 1, 1, 0, 0, 0))
    knots = [1 << i for i in range(max(1, max_tokens).bit_length() + 1)]
    rows = [roofline.seconds(StepFeatures(n, 1, 1, 0, 0, 0)) - one for n in knots]
    with_keys = roofline.seconds(StepFeatures(1, 1, 1, _KEYS, 0, 0))
    with_pairs = roofline.seconds(StepFeatures(1, 1, 1, 0, 0, _KEYS))
    return CostModel(
        fixed_s=one,
        rows=Curve(tuple(map(float, knots)), tuple(max(0.0, s) for s in rows)),
        per_decode_kv_s=max(0.0, with_keys - one) / _KEYS,
        per_pair_s=max(0.0, with_pairs - one) / _KEYS,
    )
