"""All simulations by name, in teaching order."""

from __future__ import annotations

from collections.abc import Mapping

from quire.errors import ConfigError, nearest
from quire.learn import batching, gpu_memory, kv_growth
from quire.learn.simulation import Simulation

SIMULATIONS: Mapping[str, Simulation] = {
    one.SIMULATION.name: one.SIMULATION for one in (kv_growth, batching, gpu_memory)
}


def find_simulation(name: str) -> Simulation:
    """Return the simulation ``name``.

    Raises:
        ConfigError: there is none of that name; lists those that there are.
    """
    if name not in SIMULATIONS:
        near = nearest(name, SIMULATIONS)
        raise ConfigError(f"no simulation is called {name!r}{near}; there are {', '.join(SIMULATIONS)}")
    return SIMULATIONS[name]
