"""Where the bytes of a device go: weights, activations, workspace, graphs, and what is left for K and V."""

from __future__ import annotations

from quire.cost.hardware import find_hardware
from quire.cost.split import UTILIZATION, Split
from quire.models.checkpoint import spec_of
from quire.units import GIB
from quire_lab.learn.engine import DEVICES, MODELS
from quire_lab.learn.picture import Axis, Bars, Fact, Facts, Picture
from quire_lab.learn.simulation import Simulation, choice, number
from quire_lab.plan.memory import plan_memory

_PRECISIONS = ("fp32", "bf16", "fp8", "int8", "int4")


def draw(model: str, device: str, count: int, kv_dtype: str, context: int, users: int) -> Picture:
    """Return one stacked bar per precision of the weights."""
    spec, hardware = spec_of(model), find_hardware(device)
    names = ("weights", "activations", "workspace", "graphs", "K and V wanted")
    values: dict[str, list[float]] = {name: [] for name in names}
    facts = [Fact("memory of one device that is used", hardware.memory_bytes * UTILIZATION / GIB, "GiB")]
    for precision in _PRECISIONS:
        plan = plan_memory(
            spec, hardware, Split(tp=count), precision=precision, kv_dtype=kv_dtype, context=context,
            max_num_batched_tokens=2048, max_num_seqs=users,
        )  # fmt: skip
        for name in names[:-1]:
            values[name].append(getattr(plan, name) / GIB)
        values[names[-1]].append(users * plan.kv_request_share / GIB)
        facts.append(
            Fact(f"requests of {context:,} tokens at once with {precision} weights", plan.max_requests)
        )
    bars = Bars(
        "", Axis("one device", "GiB"), _PRECISIONS, {k: tuple(v) for k, v in values.items()}, stacked=True
    )
    title = f"{model} on {count} × {hardware.title}, {users} request{'s' * (users > 1)} of {context:,} tokens"
    return Picture(title, (bars, Facts("", tuple(facts))))


SIMULATION = Simulation(
    "gpu-memory",
    "GPU memory",
    "Weights are paid once, K and V by every request: the precision of the weights decides how many fit.",
    (
        choice("model", "model", "llama-3.1-70b", MODELS),
        choice("device", "device", "h100", DEVICES),
        number("count", "devices (tensor parallel)", 4, 1, 8),
        choice("kv_dtype", "format of K and V", "bf16", ("bf16", "fp8", "int8")),
        number("context", "tokens of a request", 4096, 16, 131072, 16, "tokens"),
        number("users", "requests at once", 32, 1, 1024),
    ),
    draw,
)
