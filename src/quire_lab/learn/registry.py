"""All simulations by name, in teaching order."""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import ConfigError, nearest
from quire_lab.learn import (
    batching,
    decode_loop,
    disaggregation,
    flash_attention,
    generate_loop,
    gpu_memory,
    kv_growth,
    latency_metrics,
    memory_hierarchy,
    no_kv_cache,
    paged_attention,
    parallelism,
    prefill_decode,
    prefix_cache,
    request_lifecycle,
    server,
    speculation,
    stop_rules,
    throughput_latency,
)
from quire_lab.learn.simulation import Simulation

_ALL = (
    request_lifecycle, decode_loop, stop_rules, prefill_decode, no_kv_cache, kv_growth, memory_hierarchy,
    latency_metrics, throughput_latency, batching, generate_loop, flash_attention, paged_attention, speculation,
    gpu_memory, parallelism, prefix_cache, disaggregation, server,
)  # fmt: skip
SIMULATIONS: Mapping[str, Simulation] = {one.SIMULATION.name: one.SIMULATION for one in _ALL}


def find_simulation(name: str) -> Simulation:
    """Return the simulation ``name``.

    Raises:
        ConfigError: there is none of that name; lists those that there are.
    """
    if name not in SIMULATIONS:
        near = nearest(name, SIMULATIONS)
        raise ConfigError(f"no simulation is called {name!r}{near}; there are {', '.join(SIMULATIONS)}")
    return SIMULATIONS[name]
