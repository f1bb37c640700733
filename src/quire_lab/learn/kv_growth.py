"""How the bytes of K and V grow with the context, with grouped and with one KV head per query head."""

from __future__ import annotations

from quire.cost.hardware import find_hardware
from quire.cost.split import Split, shard_of
from quire.models.checkpoint import spec_of
from quire.units import GIB
from quire_lab.learn.engine import DEVICES, MODELS
from quire_lab.learn.picture import Axis, Fact, Facts, Line, Lines, Picture
from quire_lab.learn.simulation import Simulation, choice, number
from quire_lab.plan.memory import (
    kv_bytes_per_request,
    kv_bytes_per_token,
    plan_memory,
    with_all_kv_heads,
)

_POINTS = 33


def draw(model: str, kv_dtype: str, context: int, users: int, device: str, count: int) -> Picture:
    """Return the curves up to ``context`` tokens."""
    spec, hardware = spec_of(model), find_hardware(device)
    full = with_all_kv_heads(spec)
    contexts = [max(1, context * i // (_POINTS - 1)) for i in range(_POINTS)]
    grouped = tuple(users * kv_bytes_per_request(spec, c, kv_dtype) / GIB for c in contexts)
    ungrouped = tuple(users * kv_bytes_per_request(full, c, kv_dtype) / GIB for c in contexts)
    xs = tuple(float(c) for c in contexts)
    lines = [Line("as the model is", xs, grouped), Line("a KV head per query head", xs, ungrouped)]
    memory = plan_memory(
        spec, hardware, Split(tp=count), precision="bf16", kv_dtype=kv_dtype, context=context,
        max_num_batched_tokens=2048, max_num_seqs=users,
    )  # fmt: skip
    left = max(0, memory.kv_pool * count) / GIB
    lines.append(
        Line(f"left beside the weights on {count} × {hardware.name}", xs, (left,) * len(xs), "dashed")
    )
    weights = shard_of(spec, "bf16", Split()).weight_bytes
    lines.append(Line("the weights", xs, (weights / GIB,) * len(xs), "dashed"))
    per_token = kv_bytes_per_token(spec, kv_dtype)
    overtaken = weights / (users * per_token)  # in models of which no layer has a window, as all of `MODELS`
    marks = ((overtaken, "K and V overtake the weights"),) if overtaken <= context else ()
    facts = (
        Fact("K and V of one token", per_token, "bytes"),
        Fact(
            f"of one request of {context:,} tokens",
            kv_bytes_per_request(spec, context, kv_dtype) / GIB,
            "GiB",
        ),
        Fact(f"of {users} such requests", grouped[-1], "GiB"),
        Fact("the weights", weights / GIB, "GiB"),
        Fact(f"context at which K and V of {users} requests overtake the weights", overtaken, "tokens"),
        Fact(
            "with a KV head per query head it would be", kv_bytes_per_token(full, kv_dtype) / per_token, "×"
        ),
        Fact(f"requests of {context:,} tokens that fit on {count} × {hardware.title}", memory.max_requests),
    )
    title = f"{model}: K and V of {users} request{'s' * (users > 1)}"
    return Picture(
        title,
        (Lines("", Axis("context", "tokens"), Axis("K and V", "GiB"), tuple(lines), marks), Facts("", facts)),
    )


SIMULATION = Simulation(
    "kv-growth",
    "KV cache growth",
    "Every token leaves K and V in every layer: with context and users they grow past the weights.",
    (
        choice("model", "model", "llama-3.1-70b", MODELS),
        choice("kv_dtype", "format of K and V", "bf16", ("bf16", "fp8", "int8")),
        number("context", "context", 16384, 16, 131072, 16, "tokens"),
        number("users", "requests at once", 32, 1, 1024),
        choice("device", "device", "h100", DEVICES),
        number("count", "devices", 4, 1, 8),
    ),
    draw,
)
