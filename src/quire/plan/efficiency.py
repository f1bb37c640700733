"""`Efficiency`: the few constants between a roofline and an engine, as data with how they were found."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of what the data sheet says (0…1), and seconds that no data sheet has."""

    compute: float = 1.0  # of the dense operations a second
    memory: float = 1.0  # of the bandwidth
    experts: float = 1.0  # times the two above, for experts
    layer_s: float = 0.0  # launches and small kernels, a layer and step
    step_s: float = 0.0  # scheduling and sampling, a step
    link_s: float = 0.0  # latency of one collective
    first_s: float = 0.0  # from a request's arrival to its first row, and from its first token to the client
    wave: float = 1.0  # closed loop: prompts computed before a request's first token, at a concurrency of 1
    wave_growth: float = (
        0.0  # they grow as concurrency ** this: requests that end together come back together
    )
    how: str = "the roofline itself: nothing is lost anywhere"  # how the numbers were found

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "how" and value < 0:
                raise ConfigError(f"efficiency: {f.name} = {value!r} must be at least 0")


IDEAL = Efficiency()


@cache
def efficiencies() -> Mapping[str, Efficiency]:
    """Return engine → its constants: "vllm", "sglang", "trtllm", "cpu" and "default"."""
    text = (files("quire.plan") / "data" / "efficiency.toml").read_text()
    return {name: Efficiency(**row) for name, row in tomllib.loads(text).items()}
