"""`quire learn`: a simulation in the terminal, or as JSON."""

from __future__ import annotations

import json

from quire.errors import ConfigError
from quire_lab.bench.page import console, print_table
from quire_lab.learn.draw import draw
from quire_lab.learn.registry import SIMULATIONS, find_simulation
from quire_lab.learn.simulation import Control, Simulation


def learn(name: str | None, words: list[str], *, as_json: bool) -> int:
    """Print one simulation, or the list of all. ``words``: its controls as flags.

    Raises:
        ConfigError: no such simulation or control, or a value that it does not take.
    """
    out = console()
    if name is None:
        for one in SIMULATIONS.values():
            out.print(f"[bold]{one.name:20}[/bold] {one.sentence}", highlight=False)
        out.print("\nquire learn NAME draws one; the controls that it has are below it.", highlight=False)
        return 0
    simulation = find_simulation(name)
    picture = simulation.run(**_values(simulation, words))
    if as_json:
        print(json.dumps({"name": name, "sentence": simulation.sentence, **picture.as_dict()}, indent=1))
        return 0
    draw(out, picture)
    out.print(f"\n[dim]{simulation.sentence}[/dim]\n", highlight=False)
    rows = [(c.flag, c.label, str(c.default), _range(c)) for c in simulation.controls]
    print_table(out, ("control", "", "default", "takes"), rows)
    return 0


def _range(control: Control) -> str:
    if control.kind == "choice":
        return ", ".join(control.choices)
    if control.kind == "text":
        return "text"
    return f"{control.low:g}…{control.high:g} {control.unit}".rstrip()


def _values(simulation: Simulation, words: list[str]) -> dict[str, str]:
    """Return control → text of ``--control value`` and ``--control=value``."""
    values: dict[str, str] = {}
    left = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if len(left) % 2 or not all(flag.startswith("--") for flag in left[::2]):
        known = ", ".join(control.flag for control in simulation.controls)
        raise ConfigError(f"controls are given as --name value; {simulation.name} has {known}")
    for flag, value in zip(left[::2], left[1::2], strict=True):
        values[flag[2:].replace("-", "_")] = value
    return values
