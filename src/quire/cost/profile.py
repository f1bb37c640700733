"""`Profile`: the measured step times of one model on one machine with one set of settings, as a JSON file.

`quire profile` writes it; `quire simulate`, `quire plan` and ``quire serve --slo`` read it. `fit_steps` fits a cost
model to the step log of a server (``quire serve --step-log FILE``) instead. A profile is measured before or after the
traffic, and a shared machine changes its speed within minutes; the log has the steps of the traffic itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from quire.cost.cost_model import CostModel, StepFeatures
from quire.cost.draft_cost import DraftCost, DraftWork, MeasuredDrafts, fit_drafts
from quire.cost.fit import FitError, MeasuredStep, fit, scaled_nnls
from quire.cost.links import Links, links_from_json, links_to_json
from quire.errors import ConfigError
from quire.parallel.topology import Topology

FORMAT = "quire-profile-1"


@dataclass(frozen=True, slots=True)
class HostCost:
    """The time that serving adds to the executor's, measured on a live server beside its load generator.

    A step: planning, applying, sending events, and the cores that API process and client take from the compute threads.
    A request: HTTP, JSON and the hops to the engine and back, which the client sees before its first token.
    """

    fixed_s: float = 0.0  # per step
    per_seq_s: float = 0.0  # per sequence and step
    request_s: float = 0.0  # per request
    per_prompt_token_s: float = 0.0  # per token of a request's prompt
    per_row_s: float = 0.0  # per token of a step: first touch of its K and V memory


@dataclass(frozen=True, slots=True)
class Spread:
    """How much the machine's speed changed while it was measured: anchor steps, timed at the start, middle and end."""

    fast: float  # least seconds of an anchor as a share of its median
    slow: float
    anchors: tuple[tuple[float, ...], ...]  # seconds of each anchor at each moment

    @classmethod
    def of(cls, anchors: Sequence[Sequence[float]]) -> Spread:
        shares = [seconds / median(times) for times in anchors for seconds in times]
        return cls(min(shares, default=1.0), max(shares, default=1.0), tuple(map(tuple, anchors)))


@dataclass(frozen=True, slots=True)
class Profile:
    """A fitted model with what is needed to judge it: the machine, the error of the fit, the measured points."""

    model: str
    machine: Mapping[str, Any]  # name, cores, instruction set …
    settings: Mapping[str, Any]  # dtype, threads, block size … on which step times depend
    executor: CostModel
    host: HostCost = HostCost()
    error: FitError | None = None  # None: the model was given, not fitted
    points: tuple[MeasuredStep, ...] = ()
    measured_at: str = ""  # UTC, ISO 8601
    spread: Spread | None = None  # None: it was not measured
    draft: DraftCost | None = None  # None: nothing was drafted
    links: Links | None = None  # None: they were not measured
    # `HostCost` of a server with two "ranks" (tensor-parallel) or "stages", beyond what the links explain.
    ranked: Mapping[str, HostCost] = field(default_factory=dict)
    # Executor and host together: the seconds of a step in the engine's loop.
    step_time: CostModel = field(init=False, compare=False)

    def __post_init__(self) -> None:
        host = self.host
        timing = self.executor.plus(fixed_s=host.fixed_s, per_seq_s=host.per_seq_s, per_row_s=host.per_row_s)
        object.__setattr__(self, "step_time", timing)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "measured_at": self.measured_at,
            "cost_model": self.executor.to_json(),
            "host": asdict(self.host),
            "error": asdict(self.error) if self.error else None,
            "spread": asdict(self.spread) if self.spread else None,
            "draft_cost": self.draft.to_json() if self.draft else None,
            "links": links_to_json(self.links) if self.links else None,
            "ranked": {kind: asdict(host) for kind, host in self.ranked.items()},
            "points": [[*point.step, point.seconds] for point in self.points],
        }

    def host_of(self, topology: Topology) -> HostCost:
        """Return the host's part of a model cut so: as with two ranks, or as in one process if that is all there is."""
        if topology.world_size == 1:
            return self.host
        return self.ranked.get("stages" if topology.pp > 1 else "ranks", self.host)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")


def load_profile(path: Path) -> Profile:
    """Read the file that `Profile.save` wrote.

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
        file_format = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ConfigError(
            f"profile {path}: format = {file_format!r}, it must be {FORMAT!r}; `quire profile --out` writes one"
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
            spread=Spread.of(data["spread"]["anchors"]) if data.get("spread") else None,
            draft=DraftCost.from_json(data["draft_cost"]) if data.get("draft_cost") else None,
            links=links_from_json(data["links"]) if data.get("links") else None,
            ranked={kind: HostCost(**host) for kind, host in data.get("ranked", {}).items()},
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"profile {path}: a field is missing or of the wrong form: {error}") from error


STRAY_S = 0.02  # seconds; longer pauses are not the engine's own work


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One line of the log: the features of a step, its seconds, and those of the host before it."""

    step: StepFeatures
    seconds: float
    after_s: float
    num_decodes: int
    drafts: MeasuredDrafts | None = None  # their time is not in ``seconds``


@dataclass(frozen=True, slots=True)
class LogFit:
    """The executor's cost model, and the time that the engine's loop adds per step and per sequence."""

    executor: CostModel
    host: HostCost
    points: tuple[MeasuredStep, ...]
    draft: DraftCost | None = None


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
            data = StepFeatures._field_defaults | data  # older logs lack the fields that have a default
            step = StepFeatures(*(int(data[name]) for name in StepFeatures._fields))
            seconds, after_s = float(data["seconds"]), float(data["after_s"])
            drafts = _drafts(data["drafts"]) if "drafts" in data else None
            steps.append(LoggedStep(step, seconds, after_s, int(data["num_decodes"]), drafts))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"step log {path}, line {number}: not a step: {error!r}") from error
    return steps


def _drafts(data: Mapping[str, Any]) -> MeasuredDrafts:
    verified = tuple((int(drafts), int(accepted)) for drafts, accepted in data["verified"])
    return MeasuredDrafts(DraftWork(*map(int, data["work"])), float(data["seconds"]), verified)


def fit_steps(steps: Sequence[LoggedStep]) -> LogFit:
    """Fit the executor to all steps, and the host to the pauses before steps of an engine that had work.

    A step with a decode is one: its sequence was running before. Others may have waited for a request.

    Raises:
        ConfigError: there are no steps.
    """
    points = tuple(MeasuredStep(s.step, s.seconds) for s in steps if s.seconds > 0.0)
    executor = fit(points)
    draft = fit_drafts([s.drafts for s in steps if s.drafts is not None])
    busy = [s for s in steps if s.num_decodes and s.after_s < STRAY_S]
    if not busy:
        return LogFit(executor, HostCost(), points, draft)
    a = np.array([[1.0, float(s.step.num_seqs)] for s in busy])
    b = np.array([s.after_s for s in busy])
    fixed, per_seq = scaled_nnls(a, b).tolist()
    return LogFit(executor, HostCost(fixed, per_seq), points, draft)
