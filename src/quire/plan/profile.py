"""`Profile`: the measured step times of one model on one machine with one set of settings, as a JSON file.

`quire profile` writes it; `quire simulate`, `quire plan` and ``quire serve --slo`` read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.plan.cost_model import CostModel, StepFeatures
from quire.plan.fit import FitError, MeasuredStep

FORMAT = "quire-profile-1"


@dataclass(frozen=True, slots=True)
class HostCost:
    """What serving adds to the executor's time, measured on a live server with its load generator beside it.

    A step: planning, applying, sending events, and the cores that API process and client take from the compute threads.
    A request: HTTP, JSON and the hops to the engine and back, which the client sees before its first token.
    """

    fixed_s: float = 0.0  # a step
    per_seq_s: float = 0.0  # a sequence of a step
    request_s: float = 0.0  # a request
    per_prompt_token_s: float = 0.0  # a token of its prompt
    per_row_s: float = 0.0  # a row of a step: pages of K and V touched for the first time


@dataclass(frozen=True, slots=True)
class Profile:
    """A fitted model with all that is needed to judge it: where it was measured, how well it fits, the points."""

    model: str
    machine: Mapping[str, Any]  # name, cores, instruction set …
    settings: Mapping[str, Any]  # dtype, threads, block size … that change step times
    executor: CostModel
    host: HostCost = HostCost()
    error: FitError | None = None  # None: given, not fitted
    points: tuple[MeasuredStep, ...] = ()
    measured_at: str = ""  # UTC, ISO 8601
    step_time: CostModel = field(
        init=False, compare=False
    )  # executor + host: what a step takes in the engine's loop

    def __post_init__(self) -> None:
        host = self.host
        whole = self.executor.plus(fixed_s=host.fixed_s, per_seq_s=host.per_seq_s, per_row_s=host.per_row_s)
        object.__setattr__(self, "step_time", whole)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "measured_at": self.measured_at,
            "cost_model": self.executor.to_json(),
            "host": asdict(self.host),
            "error": self.error.to_json() if self.error else None,
            "points": [[*point.step, point.seconds] for point in self.points],
        }

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def load_profile(path: Path) -> Profile:
    """Read what `Profile.save` wrote.

    Raises:
        ConfigError: the file cannot be read, or is not a profile; names the field.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"profile {path}: cannot be read ({error.strerror}); `quire profile --out` writes one"
        ) from error
    except ValueError as error:
        raise ConfigError(f"profile {path}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ConfigError(
            f"profile {path}: format = {found!r}, it must be {FORMAT!r}; `quire profile --out` writes one"
        )
    try:
        return Profile(
            model=data["model"],
            machine=data["machine"],
            settings=data["settings"],
            executor=CostModel.from_json(data["cost_model"]),
            host=HostCost(**data["host"]),
            error=FitError(**data["error"]) if data["error"] else None,
            points=tuple(MeasuredStep(StepFeatures(*p[:-1]), p[-1]) for p in data["points"]),
            measured_at=data["measured_at"],
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"profile {path}: a field is missing or of the wrong form: {error}") from error
