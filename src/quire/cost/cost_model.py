"""The step-time model: features of a step → seconds. One form for profiles, the simulator and ``serve --slo``.

    seconds = fixed_s + rows(num_tokens) + logits(num_logits) + per_seq_s · num_seqs
              + per_decode_kv_s · decode_kv_tokens + spill(decode_kv_tokens)
              + per_chunk_kv_s · chunk_kv_tokens + per_pair_s · chunk_pairs + per_draft_pair_s · draft_pairs

What each term measures, in bytes and operations:

    fixed_s      reading all weights once, whatever the number of rows; launches, Python
    rows         the linears' operations: flat while the weight bytes are the bound, straight when the dot units are;
                 a rising piecewise linear curve, since tiles and caches bend it
    logits       the same for the output matrix, and the sampler
    per_seq_s    work per sequence: block tables, results
    decode_kv    reading K and V of a sequence with one row once: bytes
    spill        the additional time once they exceed the CPU caches: a key from memory costs two to four times one
                 from the last-level cache (Quill on an Emerald Rapids)
    chunk_kv     reading K and V of a longer chunk once per tile of rows: bytes
    pairs        multiplying each (query, key) pair of a longer chunk: operations
    draft pairs  the same for the drafts behind a decode, whose keys are read once for all of its rows

`quire.cost.fit` finds the numbers from measured steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, cast

from quire.errors import ConfigError
from quire.step import StepPlan


class StepFeatures(NamedTuple):
    """The work of a step. A chunk is a sequence with several tokens in the step, a decode a sequence with one."""

    num_tokens: int  # computed
    num_seqs: int
    num_logits: int  # rows from which a token is sampled
    decode_kv_tokens: int  # keys that all decodes read together
    chunk_kv_tokens: int  # keys that the chunks read, each once per chunk
    chunk_pairs: int  # (query, key) pairs of the chunks
    draft_pairs: int = 0  # (query, key) pairs of the drafts that decodes verify


class StepTime(Protocol):
    """Seconds of a step: a fitted `CostModel`, or a roofline."""

    def seconds(self, step: StepFeatures) -> float:
        """Return the seconds of ``step``."""
        ...


class StagedTime(StepTime, Protocol):
    """Seconds of a step on each stage of a pipeline."""

    def stage_seconds(self, step: StepFeatures) -> tuple[float, ...]:
        """Return the seconds of ``step`` on each stage, without waiting for another."""
        ...


def features(plan: StepPlan, sampled: Collection[int]) -> StepFeatures:
    """Return the features of ``plan``; ``sampled``: ids of the sequences that sample tokens.

    The plan alone does not say that: a chunk samples if it ends at the sequence's last known token. A decode with
    drafts samples at each of its tokens, and reads its keys once.
    """
    rows = num_logits = decode_kv = chunk_kv = pairs = draft_pairs = 0
    for seq in plan.seqs:
        start, count = seq.num_computed_tokens, seq.num_scheduled_tokens
        rows += count
        if seq.seq_id in sampled:
            num_logits += 1 + seq.num_draft_tokens
        if seq.num_known_tokens == 1:
            decode_kv += start + count
            if count > 1:
                draft_pairs += chunk_pairs(start + 1, count - 1)
        else:
            chunk_kv += start + count
            pairs += chunk_pairs(start, count)
    return StepFeatures(rows, len(plan.seqs), num_logits, decode_kv, chunk_kv, pairs, draft_pairs)


def chunk_pairs(start: int, count: int) -> int:
    """Return the (query, key) pairs of the rows ``start … start + count − 1``: row p sees keys 0 … p."""
    return count * start + count * (count + 1) // 2


@dataclass(frozen=True, slots=True)
class Scaled:
    """The step times of another model, times ``factor``."""

    inner: StepTime
    factor: float

    def seconds(self, step: StepFeatures) -> float:
        """Return the seconds of ``step``."""
        return self.factor * self.inner.seconds(step)

    def stage_seconds(self, step: StepFeatures) -> tuple[float, ...]:
        """Return the seconds of ``step`` on each stage of a pipeline."""
        return tuple(self.factor * seconds for seconds in cast(StagedTime, self.inner).stage_seconds(step))


@dataclass(frozen=True, slots=True)
class Curve:
    """A rising piecewise linear function through (knots, values): flat before the first, extrapolated at the end."""

    knots: tuple[float, ...]
    values: tuple[float, ...]  # seconds
    slopes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.knots or len(self.knots) != len(self.values):
            raise ConfigError(
                f"a curve has {len(self.knots)} knots and {len(self.values)} values; the numbers must be equal"
            )
        if list(self.knots) != sorted(set(self.knots)):
            raise ConfigError(f"knots = {list(self.knots)} must ascend")
        pairs = list(zip(self.knots, self.values, strict=True))
        slopes = [(v1 - v0) / (k1 - k0) for (k0, v0), (k1, v1) in pairwise(pairs)]
        object.__setattr__(self, "slopes", (*slopes, slopes[-1] if slopes else 0.0))

    def at(self, x: float) -> float:
        """Return the value at ``x``."""
        index = bisect_right(self.knots, x) - 1
        if index < 0:
            return self.values[0]
        return self.values[index] + self.slopes[index] * (x - self.knots[index])


FLAT = Curve((1.0,), (0.0,))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step from its features; see the module. All numbers are ≥ 0."""

    fixed_s: float
    rows: Curve = FLAT
    logits: Curve = FLAT
    per_seq_s: float = 0.0
    per_decode_kv_s: float = 0.0
    per_chunk_kv_s: float = 0.0
    per_pair_s: float = 0.0
    spill: Curve = FLAT
    per_draft_pair_s: float = 0.0

    def __post_init__(self) -> None:
        for name in _RATES:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0.0):
                raise ConfigError(f"cost model: {name} = {value!r} must be a number ≥ 0")

    def seconds(self, step: StepFeatures) -> float:
        """Return the seconds of ``step``. A step without tokens (only moves) takes no time."""
        num_tokens, num_seqs, num_logits, decode_kv, chunk_kv, pairs, draft_pairs = step
        if num_tokens == 0:
            return 0.0
        seconds = (
            self.fixed_s
            + self.rows.at(num_tokens)
            + self.per_seq_s * num_seqs
            + self.per_decode_kv_s * decode_kv
            + self.spill.at(decode_kv)
            + self.per_chunk_kv_s * chunk_kv
            + self.per_pair_s * pairs
            + self.per_draft_pair_s * draft_pairs
        )
        return seconds + self.logits.at(num_logits) if num_logits else seconds

    def plus(self, *, fixed_s: float = 0.0, per_seq_s: float = 0.0, per_row_s: float = 0.0) -> CostModel:
        """Return the model with more time per step, per sequence and per row: the time that the host adds."""
        rows = self.rows
        if per_row_s:
            knots = rows.knots if len(rows.knots) > 1 else (rows.knots[0], rows.knots[0] + 1.0)
            rows = Curve(knots, tuple(rows.at(k) + per_row_s * k for k in knots))
        return replace(self, fixed_s=self.fixed_s + fixed_s, per_seq_s=self.per_seq_s + per_seq_s, rows=rows)

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and lists; `from_json` gives the same model bit for bit."""
        curves: dict[str, Curve] = {name: getattr(self, name) for name in _CURVES}
        return {name: getattr(self, name) for name in _RATES} | {
            name: {"knots": list(curve.knots), "values": list(curve.values)} for name, curve in curves.items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostModel:
        """Return the model that `to_json` wrote.

        Raises:
            ConfigError: names the field that is missing or wrong.
        """
        unknown = sorted(set(data) - {*_RATES, *_CURVES})
        if unknown:
            raise ConfigError(
                f"cost model: unknown field {unknown[0]!r}; allowed: {', '.join((*_RATES, *_CURVES))}"
            )
        if "fixed_s" not in data:
            raise ConfigError("cost model: the field 'fixed_s' is missing")
        fields: dict[str, Any] = {name: data[name] for name in _RATES if name in data}
        fields |= {name: _curve(name, data[name]) for name in _CURVES if name in data}
        return cls(**fields)


_RATES = ("fixed_s", "per_seq_s", "per_decode_kv_s", "per_chunk_kv_s", "per_pair_s", "per_draft_pair_s")
_CURVES = ("rows", "logits", "spill")


def _curve(name: str, data: Any) -> Curve:
    try:
        knots = tuple(float(x) for x in data["knots"])
        return Curve(knots, tuple(float(x) for x in data["values"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cost model: {name} = {data!r} must be an object of two lists of numbers, 'knots' and 'values'"
        ) from error
