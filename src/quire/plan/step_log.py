"""The step log of a server (``quire serve --step-log FILE``) → a cost model fitted to what its steps really took.

A profile is measured before or after the traffic, and a shared machine changes its speed within minutes; the log has
the steps of the traffic itself. What the simulator then does with their times is its own: it plans every step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from quire.errors import ConfigError
from quire.plan.cost_model import CostModel, StepFeatures
from quire.plan.fit import MeasuredStep, fit, nnls
from quire.plan.profile import HostCost

STRAY_S = 0.02  # between two steps of an engine with work; longer: it was not the engine's work


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One line: what a step had to do, its seconds, and the host's before it."""

    step: StepFeatures
    seconds: float
    after_s: float
    num_decodes: int


@dataclass(frozen=True, slots=True)
class LogFit:
    """The executor's cost model, and what the engine's loop adds to a step and to each of its sequences."""

    executor: CostModel
    host: HostCost
    points: tuple[MeasuredStep, ...]


def read_steps(path: Path) -> list[LoggedStep]:
    """Read a step log.

    Raises:
        ConfigError: it cannot be read, or a line is none of a step log; names the line.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"step log {path}: cannot be read ({error.strerror})") from error
    steps = []
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            step = StepFeatures(*(int(data[name]) for name in StepFeatures._fields))
            steps.append(
                LoggedStep(step, float(data["seconds"]), float(data["after_s"]), int(data["num_decodes"]))
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"step log {path}, line {number}: not a step: {error!r}") from error
    return steps


def fit_steps(steps: Sequence[LoggedStep]) -> LogFit:
    """Fit the executor to all steps, the host to the pauses before those that an engine with work began.

    A step with a decode is one: its sequence was running before. Others may have waited for a request.

    Raises:
        ConfigError: there are no steps.
    """
    points = tuple(MeasuredStep(s.step, s.seconds) for s in steps if s.seconds > 0.0)
    executor = fit(points)
    busy = [s for s in steps if s.num_decodes and s.after_s < STRAY_S]
    if not busy:
        return LogFit(executor, HostCost(), points)
    a = np.array([[1.0, float(s.step.num_seqs)] for s in busy])
    b = np.array([s.after_s for s in busy])
    scale = np.linalg.norm(a, axis=0)
    fixed, per_seq = (nnls(a / scale, b) / scale).tolist()
    return LogFit(executor, HostCost(fixed, per_seq), points)
