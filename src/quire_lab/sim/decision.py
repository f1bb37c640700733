"""``quire simulate --versus``: which of two settings is better, over draws of what is not known exactly.

A draw is one state of the machine within the spread of its profile, or one engine's constants for a roofline, and one
seed of the load. Both settings run under each draw. Two figures may scatter by more than they differ, and still one
setting is better in every draw: so a decision counts draws, and does not compare means.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.args import make_args
from quire.cost.cost_model import Scaled
from quire.cost.efficiency import MEASURED
from quire.errors import ConfigError, nearest
from quire_lab.bench.args import SIMULATED, ServeBenchArgs, SimulateArgs
from quire_lab.bench.page import show
from quire_lab.bench.runs import make_workload
from quire_lab.sim.run import simulate, summary_of
from quire_lab.sim.scenario import value_of
from quire_lab.sim.setup import set_up

NEAR = 0.01  # shares of each other by which two figures count as equal


@dataclass(frozen=True, slots=True)
class Side:
    """The settings of one simulation, as `quire_lab.sim.setup.set_up` takes them."""

    name: str
    args: SimulateArgs
    flags: ServeBenchArgs
    settings: Mapping[str, Any]

    def changed(self, text: str) -> Side:
        """Return these settings with those of ``text``, such as ``max_num_seqs=8,gate="static"``.

        Raises:
            ConfigError: a part is no setting of `quire simulate`; names it.
        """
        args, flags, settings = self.args, self.flags, dict(self.settings)
        for key, value in _pairs(text).items():
            if key in SimulateArgs.__dataclass_fields__:
                make_args(SimulateArgs, {key: value}, origin="--versus")
                args = replace(args, **{key: value})
            elif key in ServeBenchArgs.__dataclass_fields__:
                make_args(ServeBenchArgs, {key: value}, origin="--versus")
                flags = replace(flags, **{key: value})
            elif key in SIMULATED:
                settings[key] = value
            else:
                known = (*SimulateArgs.__dataclass_fields__, *ServeBenchArgs.__dataclass_fields__, *SIMULATED)
                raise ConfigError(f"--versus {text!r}: no setting is called {key!r}{nearest(key, known)}")
        return Side(text, args, flags, settings)

    def drawn(self, number: int, draws: int) -> dict[str, Any]:
        """Return the summary of draw ``number``."""
        engine = self.args.engine
        if self.args.hardware is not None and engine is None:
            engine = MEASURED[number % len(MEASURED)]
        setup = set_up(replace(self.args, engine=engine), self.flags, self.settings)
        step_time, spread = setup.step_time, setup.spread
        if spread is not None and spread.slow > spread.fast:
            part = (number + 0.5) / draws
            step_time = Scaled(step_time, spread.fast * (spread.slow / spread.fast) ** part)
        workload = make_workload(
            replace(
                self.flags,
                seed=self.flags.seed + number,
                max_model_len=setup.config.scheduler.max_model_len,
            )
        )
        return summary_of(
            simulate(setup.config, step_time, workload, scaling=setup.scaling), setup.slo, workload
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """``figure`` of both sides in each draw; ``higher``: whether more of it is better."""

    names: tuple[str, str]
    figure: str
    higher: bool
    values: tuple[tuple[float, float], ...]

    @property
    def wins(self) -> tuple[int, int]:
        """The draws in which each side is better by more than `NEAR`."""
        first = second = 0
        for a, b in self.values:
            better = a - b if self.higher else b - a
            if abs(better) > NEAR * max(abs(a), abs(b)):
                first, second = first + (better > 0), second + (better < 0)
        return first, second

    def __str__(self) -> str:
        wins, draws = self.wins, len(self.values)
        first = 0 if wins[0] >= wins[1] else 1
        ranges = [f"{show(min(side))} … {show(max(side))}" for side in zip(*self.values, strict=True)]
        text = f"{self.figure} {ranges[first]} against {ranges[1 - first]}"
        equal = draws - sum(wins)
        tail = f", equal in {equal}" if equal else ""
        if wins[0] == wins[1]:
            return f"{self.names[0]} and {self.names[1]} are level in {draws} draws ({wins[0]} each{tail}): {text}"
        return f"{self.names[first]} before {self.names[1 - first]} in {wins[first]} of {draws} draws{tail}: {text}"


def decide(side: Side, text: str, draws: int) -> Decision:
    """Compare ``side`` with itself under the changes of ``text``: by goodput with an SLO, else by the mean E2EL."""
    other = side.changed(text)
    figure, higher = ("goodput_per_s", True) if side.flags.slo else ("e2el_ms.mean", False)
    values = []
    for number in range(draws):
        pair = [value_of(run.drawn(number, draws), figure) or 0.0 for run in (side, other)]
        values.append((pair[0], pair[1]))
    return Decision(("as given", other.name), figure, higher, tuple(values))


def _pairs(text: str) -> dict[str, Any]:
    """Read ``a=1,b="x"`` as TOML values; a word without quotes is a text, and dashes are those of flags."""
    settings: dict[str, Any] = {}
    for part in (p.strip() for p in text.split(";" if ";" in text else ",") if p.strip()):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals:
            raise ConfigError(f"--versus {text!r}: {part!r} must be SETTING=VALUE, such as max_num_seqs=8")
        try:
            read = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            read = value
        settings[key.removeprefix("--").replace("-", "_")] = read
    return settings
