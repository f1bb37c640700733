"""Ways to cut a model over devices: bytes on each, bytes on the links, step times, and the pipeline's bubble."""

from __future__ import annotations

from quire.cost.efficiency import efficiency_of
from quire.cost.hardware import find_hardware
from quire.cost.roofline import Roofline, decoder_work
from quire.cost.split import ACTIVATION_BYTES, Split
from quire.models.checkpoint import spec_of
from quire.modelspec import ModelSpec
from quire.parallel.shard import shard
from quire.parallel.topology import Topology
from quire.parallel.traffic import sent
from quire.units import GIB
from quire_lab.learn.engine import DEVICES, MODELS
from quire_lab.learn.picture import Axis, Bars, Cell, Fact, Facts, Grid, Picture, Table
from quire_lab.learn.prefill_decode import decode_step, prefill_step
from quire_lab.learn.simulation import Simulation, choice, number
from quire_lab.plan.laws import bubble
from quire_lab.plan.memory import plan_memory


def splits(spec: ModelSpec, count: int) -> list[Split]:
    """Return the powers of 2 of tp · pp · dp that make ``count`` devices, and whole experts where there are any."""
    heads = min(a.num_heads for a in spec.attentions)
    sizes = [1 << i for i in range(count.bit_length())]
    options = [
        Split(tp=tp, pp=pp, dp=count // (tp * pp))
        for tp in sizes
        for pp in sizes
        if count % (tp * pp) == 0 and heads % tp == 0 and pp <= spec.num_layers
    ]
    if any(layer.mlp.moe for layer in spec.layers) and count > 1:
        options.append(Split(tp=1, ep=count, attention_dp=count))
    return options


def draw(
    model: str, device: str, devices: str, precision: str, batch: int, prompt: int, microbatches: int
) -> Picture:
    """Return all ways to cut the model over ``count`` devices."""
    spec, hardware, count = spec_of(model), find_hardware(device), int(devices)
    rows, weights, links = [], [], []
    names = []
    for split in splits(spec, count):
        efficiency = efficiency_of("default", hardware, spec, precision)
        steps = Roofline(decoder_work(spec, precision, "bf16", split), hardware, efficiency)
        memory = plan_memory(spec, hardware, split, precision=precision, kv_dtype="bf16", context=prompt,
                             max_num_batched_tokens=2048, max_num_seqs=batch)  # fmt: skip
        name = f"EP{split.ep} with DP attention" if split.attention_dp > 1 else str(split)
        share = max(1, batch // split.dp)
        decode, prefill = steps.parts(decode_step(share, prompt)), steps.parts(prefill_step(prompt))
        moved = sum(link.total_bytes for link in steps.link_uses(*2 * (share / split.attention_dp,)))
        waits = bubble(split.pp, microbatches)
        fits = "yes" if memory.fits else "no"
        rows.append((name, memory.weights / GIB, fits, memory.max_requests * split.dp, moved / 1e6,
                     decode.links * 1e3, decode.seconds * 1e3, prefill.seconds * 1e3, waits * 100))  # fmt: skip
        names.append(name)
        weights.append(memory.weights / GIB)
        links.append(moved / 1e6)
    header = ("split", "weights, GiB", "fits", f"requests of {prompt:,}", "link MB/step", "link ms/step",
              "decode, ms", "prompt, ms", "bubble, %")  # fmt: skip
    parts = (
        Bars("weights on one device", Axis("weights", "GiB"), tuple(names), {"": tuple(weights)}),
        Bars(
            f"bytes that one device sends in a decode step of {batch}",
            Axis("links", "MB"),
            tuple(names),
            {"": tuple(links)},
        ),
        Table("", header, tuple(rows)),
        _ranks(spec, count),
    )
    fitting = [row for row in rows if row[2] == "yes"]
    quickest = min(fitting or rows, key=lambda row: row[6])
    facts = (
        Fact("splits whose weights and one request fit", len(fitting)),
        Fact("quickest decode step", quickest[6], f"ms, by {quickest[0]}"),
        Fact(
            "bytes of one token on the links of a layer's two all-reduces, per device",
            _per_layer(spec, count),
            "bytes",
        ),
    )
    return Picture(f"{model} as {precision} on {count} × {hardware.title}", (*parts, Facts("", facts)))


def _per_layer(spec: ModelSpec, count: int) -> float:
    return 2 * sent("all_reduce", spec.hidden_size, count, ACTIVATION_BYTES, ACTIVATION_BYTES, "ring")


def _ranks(spec: ModelSpec, count: int) -> Grid:
    """Return which layers and heads each rank has under tensor, pipeline and mixed parallelism."""
    rows, names = [], []
    for topology in (
        Topology(tp=count),
        Topology(pp=count),
        Topology(tp=max(1, count // 2), pp=min(2, count)),
    ):
        cells = []
        for rank in range(topology.world_size):
            part = shard(spec, topology, rank)
            heads = part.spec.attentions[0].num_heads
            text = f"layers {part.layers.start}–{part.layers.stop - 1}, {heads} heads"
            cells.append(Cell(f"stage {part.at.pp}", text))
        rows.append(tuple(cells))
        names.append(
            str(topology).replace("tensor_parallel_size", "TP").replace("pipeline_parallel_size", "PP")
        )
    return Grid("what each rank has", tuple(rows), tuple(names))


SIMULATION = Simulation(
    "parallelism",
    "Parallelism",
    "Tensor parallelism pays on the links, a pipeline with waiting, replicas with a copy of the weights each.",
    (
        choice("model", "model", "llama-3.1-70b", MODELS),
        choice("device", "device", "h100", DEVICES),
        choice("devices", "devices", "8", ("1", "2", "4", "8", "16")),
        choice("precision", "weights", "bf16", ("bf16", "fp8", "int8", "int4")),
        number("batch", "sequences of a decode step", 32, 1, 1024),
        number("prompt", "tokens of a prompt", 2048, 16, 32768, 16, "tokens"),
        number("microbatches", "microbatches in the pipeline", 4, 1, 64),
    ),
    draw,
)
