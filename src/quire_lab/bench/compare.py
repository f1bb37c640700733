"""``quire serve --compare-to``: recorded requests through this engine; do tokens or latencies drift?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quire.args import ServerArgs
from quire.clock import Clock, WallClock
from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.process import ProcessClient
from quire.engine.recording_file import about
from quire.engine.request_log import RecordedRequest, RecordedSample, read_requests
from quire.errors import ConfigError
from quire.request import FinishReason, Request, Terms

MAX_PAUSE_S = 1.0  # seconds idle; longer pauses of the recording are shortened
LEAST_S = 0.001  # a median that grows by less is no drift
_FAILED = (FinishReason.ERROR, FinishReason.DEADLINE)


@dataclass(frozen=True, slots=True)
class Median:
    """A latency, in seconds, as recorded and now; None: no request tells."""

    name: str
    recorded_s: float | None
    now_s: float | None

    def drifts(self, allowed: float) -> bool:
        """Whether it grew by more than the share ``allowed``, and by more than `LEAST_S`."""
        if self.recorded_s is None or self.now_s is None:
            return False
        return self.now_s > self.recorded_s * (1 + allowed) and self.now_s - self.recorded_s > LEAST_S


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a run against recorded requests found."""

    num_requests: int
    num_skipped: int  # nothing to compare: pooling, no token, or an image
    num_tokens: int
    differences: tuple[str, ...]  # one per sample
    medians: tuple[Median, ...]


def compare_to(client: ProcessClient, config: EngineConfig, args: ServerArgs, path: str) -> int:
    """Run the requests of ``path`` instead of serving; return 1 where tokens or latencies drift."""
    try:
        client.wait_ready()
        origin, comparison = compare(client, Path(path), WallClock())
    finally:
        client.close()
    text, drifts = report(origin, about(config), comparison, args.compare_latency)
    print(text)
    return 1 if drifts else 0


def compare(client: EngineClient, path: Path, clock: Clock) -> tuple[dict[str, str], Comparison]:
    """Send the requests of ``path`` to an engine that is ready, at their recorded times.

    Raises:
        ConfigError: the file cannot be read, or has no request to compare.
    """
    origin, recorded = read_requests(path)
    comparable = [one for one in recorded if any(s.token_ids for s in one.samples) and not one.request.spans]
    if not comparable:
        raise ConfigError(
            f"{path} has no request with tokens and without images: there is nothing to compare"
        )
    first = replace(comparable[0], request=replace(comparable[0].request, terms=Terms(cache_salt="warm-up")))
    # The first steps of an engine take longer, and the recorded server had served before.
    _run(client, [first], clock)
    got = _run(client, comparable, clock)
    differences = [
        text for one, other in zip(comparable, got, strict=True) for text in _differences(one, other)
    ]
    ended = [(one, other) for one, other in zip(comparable, got, strict=True) if one.has_ended]
    medians = (
        _median("TTFT", [(_ttft_s(one), _ttft_s(other)) for one, other in ended]),
        _median("TPOT", [(_tpot_s(one), _tpot_s(other)) for one, other in ended]),
    )
    num_tokens = sum(len(sample.token_ids) for request in comparable for sample in request.samples)
    return origin, Comparison(
        len(comparable), len(recorded) - len(comparable), num_tokens, tuple(differences), medians
    )


def _run(client: EngineClient, recorded: Sequence[RecordedRequest], clock: Clock) -> list[RecordedRequest]:
    """Run the requests; return what each gets, in the same order."""
    got: list[RecordedRequest] = []
    by_id: dict[str, RecordedRequest] = {}
    shift_s = clock.now() - recorded[0].request.arrival_s
    while len(got) < len(recorded) or by_id:
        now_s = clock.now()
        wait_s: float | None = None
        if len(got) < len(recorded):
            wait_s = recorded[len(got)].request.arrival_s + shift_s - now_s
            if not by_id and wait_s > MAX_PAUSE_S:
                shift_s -= wait_s - MAX_PAUSE_S
                wait_s = MAX_PAUSE_S
            if wait_s <= 0:
                request = _again(recorded[len(got)], f"compare/{len(got)}", now_s)
                by_id[request.request_id] = RecordedRequest.of(request)
                got.append(by_id[request.request_id])
                client.send(request)
                continue
        for event in client.receive(wait_s):
            replayed = by_id.get(event.request_id)
            if replayed is not None:
                replayed.take(event, clock.now())
                if event.error is not None:
                    replayed.samples[event.sample_index].finish_reason = f"error: {event.error}"
                if replayed.has_ended:
                    del by_id[event.request_id]
    return got


def _again(recorded: RecordedRequest, name: str, now_s: float) -> Request:
    """Return the request to send: without limits of time, and no longer than what was recorded."""
    request = recorded.request
    sampling = request.sampling
    if not sampling.use_beam_search:
        longest = max(len(sample.token_ids) for sample in recorded.samples)
        most = longest if sampling.max_tokens is None else min(longest, sampling.max_tokens)
        sampling = replace(sampling, max_tokens=most)
    return replace(
        request,
        request_id=name,
        sampling=sampling,
        arrival_s=now_s,
        terms=replace(request.terms, deadline=None),
    )


def _differences(recorded: RecordedRequest, got: RecordedRequest) -> list[str]:
    differences = []
    for index, (want, have) in enumerate(zip(recorded.samples, got.samples, strict=True)):
        if want.finish_reason in _FAILED and not want.token_ids:
            continue
        text = _differ(want, have)
        if text is not None:
            differences.append(f"{recorded.request.request_id}, sample {index}: {text}")
    return differences


def _differ(want: RecordedSample, have: RecordedSample) -> str | None:
    for place, (expected, got) in enumerate(zip(want.token_ids, have.token_ids, strict=False)):
        if expected != got:
            return f"token {place}: expected {expected}, got {got}"
    missing = len(want.token_ids) - len(have.token_ids)
    if missing > 0:
        return f"ended {missing} tokens early: {have.finish_reason}"
    # Samples are as long as the longest one of their request may be.
    if want.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and missing < 0:
        return f"{-missing} tokens more than recorded"
    return None


def _ttft_s(request: RecordedRequest) -> float | None:
    return min((s.ttft_s for s in request.samples if s.ttft_s is not None), default=None)


def _tpot_s(request: RecordedRequest) -> float | None:
    times = [
        (s.e2el_s - s.ttft_s) / (len(s.token_ids) - 1)
        for s in request.samples
        if s.ttft_s is not None and s.e2el_s is not None and len(s.token_ids) > 1
    ]
    return statistics.mean(times) if times else None


def _median(name: str, pairs: Sequence[tuple[float | None, float | None]]) -> Median:
    complete = [(before, now) for before, now in pairs if before is not None and now is not None]
    if not complete:
        return Median(name, None, None)
    return Median(name, statistics.median(b for b, _ in complete), statistics.median(n for _, n in complete))


def report(
    recorded: Mapping[str, str], here: Mapping[str, str], comparison: Comparison, allowed: float
) -> tuple[str, bool]:
    """Return the table, and whether anything drifts beyond what is allowed."""
    exact = recorded.get("determinism") == here["determinism"] == "exact"
    lines = [
        f"requests  {comparison.num_requests} compared, {comparison.num_skipped} without tokens or "
        "with images left out"
    ]
    for name in ("model", "fingerprint", "kernels", "formats", "device", "quire"):
        if recorded.get(name) != here[name]:
            lines.append(f"{name:9} recorded {recorded.get(name)}, here {here[name]}")
    num_equal = "all equal" if not comparison.differences else f"{len(comparison.differences)} samples differ"
    lines.append(f"tokens    {comparison.num_tokens} recorded, {num_equal}")
    lines += [f"          {text}" for text in comparison.differences[:10]]
    if comparison.differences and not exact:
        lines.append("          no drift: tokens depend on the batch here, or did when they were recorded")
    lines.append(f"{'p50':9} {'recorded':>12} {'now':>12} {'change':>8} {'allowed':>8}")
    drifts = bool(comparison.differences) and exact
    for median in comparison.medians:
        if median.recorded_s is None or median.now_s is None:
            lines.append(f"{median.name:9} {'-':>12} {'-':>12}")
            continue
        change = median.now_s / max(1e-9, median.recorded_s) - 1
        verdict = "  drift" if median.drifts(allowed) else ""
        drifts = drifts or median.drifts(allowed)
        lines.append(
            f"{median.name:9} {median.recorded_s * 1e3:9.2f} ms {median.now_s * 1e3:9.2f} ms {change:>+8.0%} "
            f"{allowed:>+8.0%}{verdict}"
        )
    lines.append("drift" if drifts else "no drift")
    return "\n".join(lines), drifts
