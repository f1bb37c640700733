"""An engine that dies: streams continue as if nothing had happened, or end with one error each."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.scripted import ScriptedClient, clients, token_of

from quire.clock import VirtualClock
from quire.engine.client import EngineHealth
from quire.engine.messages import AbortRequest, ChangePolicy, FinishSample, Message, Reply
from quire.engine.process import decode, encode
from quire.engine.recording_file import default_folder
from quire.engine.supervisor import InFlight, RestartPolicy, Supervisor
from quire.errors import EngineDeadError, ModelLoadError
from quire.request import FinishReason, Request, SamplingParams, Terms, TokenEvent
from quire.scheduler.settings import PolicyChange

NO_PAUSE = RestartPolicy(max_restarts=3, backoff_s=0.0)


def request(name: str = "r", *, n: int = 1, max_tokens: int = 8, seed: int = 3) -> Request:
    return Request(name, (1, 2), SamplingParams(n=n, max_tokens=max_tokens, seed=seed), 0.0)


def undisturbed(asked: Request) -> list[list[int]]:
    limit = asked.sampling.max_tokens or 0
    return [[token_of(asked, i, p) for p in range(limit)] for i in range(asked.sampling.n)]


class Reader:
    """Collects tokens and terminal events by (request, sample)."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], list[TokenEvent]] = {}

    def read(self, supervisor: Supervisor, until: int) -> None:
        for _ in range(200):
            for event in supervisor.receive(0.0):
                key = (event.request_id, event.sample_index)
                self.tokens.setdefault(key, []).extend(event.token_ids)
                if event.finish_reason is not None:
                    self.ends.setdefault(key, []).append(event)
            if len(self.ends) == until:
                return
        raise AssertionError(f"only {len(self.ends)} of {until} samples ended")


def test_streams_go_on_over_two_deaths() -> None:
    first, second = ScriptedClient(die_after=3), ScriptedClient(die_after=2)
    supervisor = Supervisor(first, clients(second, ScriptedClient()), VirtualClock(), NO_PAUSE)
    asked = [request("a", n=2), request("b", max_tokens=4, seed=9), request("c", max_tokens=3)]
    for one in asked:
        supervisor.send(one)
    reader = Reader()
    reader.read(supervisor, until=4)
    for one in asked:
        for index, tokens in enumerate(undisturbed(one)):
            assert reader.tokens[one.request_id, index] == tokens
            (end,) = reader.ends[one.request_id, index]
            assert end.finish_reason is FinishReason.LENGTH
    assert supervisor.num_restarts == 2
    assert first.closed
    assert [m.request_id for m in second.sent if isinstance(m, Request)] == ["a", "b"], "c was over"


def test_requests_between_two_engines_run_exactly_once() -> None:
    dead, fresh = ScriptedClient(die_after=0), ScriptedClient()

    def restart() -> ScriptedClient:
        supervisor.send(request("late"))
        supervisor.send(request("gone"))
        supervisor.send(AbortRequest("gone"))
        return fresh

    supervisor = Supervisor(dead, restart, VirtualClock(), NO_PAUSE)
    supervisor.send(request("early"))
    reader = Reader()
    reader.read(supervisor, until=2)
    added = [m.request_id for m in fresh.sent if isinstance(m, Request)]
    assert added == ["early", "late"]


def test_a_machine_that_starts_no_process_is_waited_for() -> None:
    """A full disk, no memory, no file: the requests go on once there is room, and no restart is used up."""
    fresh, tried = ScriptedClient(), []

    def restart() -> ScriptedClient:
        tried.append(supervisor.health())
        if len(tried) < 5:
            raise OSError(28, "No space left on device")
        return fresh

    policy = RestartPolicy(max_restarts=1, backoff_s=0.0, start_retry_s=0.0)
    supervisor = Supervisor(ScriptedClient(die_after=2), restart, VirtualClock(), policy)
    asked = request("a", n=2)
    supervisor.send(asked)
    reader = Reader()
    reader.read(supervisor, until=2)
    assert [reader.tokens["a", i] for i in range(2)] == undisturbed(asked)
    assert supervisor.num_restarts == 1
    assert (tried[-1].status, "No space left" in str(tried[-1].reason)) == ("restarting", True)


def test_too_many_restarts_end_every_request_once() -> None:
    dying = [ScriptedClient(die_after=1) for _ in range(4)]
    policy = RestartPolicy(max_restarts=3, backoff_s=0.0, suspect_deaths=99)
    supervisor = Supervisor(dying[0], clients(*dying[1:]), VirtualClock(), policy)
    supervisor.send(request("a", n=3))
    reader = Reader()
    reader.read(supervisor, until=3)
    for index in range(3):
        (end,) = reader.ends["a", index]
        assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, "dead")
        assert "max_restarts = 3" in (end.error or "")
        assert len(reader.tokens["a", index]) == 4
    with pytest.raises(EngineDeadError, match="3 restarts did not help"):
        supervisor.receive()
    supervisor.send(request("b"))
    (refusal,) = supervisor.receive()
    assert refusal.finish_reason is FinishReason.ERROR
    with pytest.raises(EngineDeadError):
        supervisor.receive()


def test_failed_restarts_count_and_old_ones_do_not() -> None:
    clock = VirtualClock()
    policy = RestartPolicy(max_restarts=2, window_s=60.0, backoff_s=0.0, suspect_deaths=99)
    made = [
        ScriptedClient(load_error=ModelLoadError("the file is gone")),
        ScriptedClient(die_after=1),
        ScriptedClient(),
    ]
    supervisor = Supervisor(ScriptedClient(die_after=1), clients(*made), clock, policy)
    supervisor.send(request("a", max_tokens=3))
    assert len(supervisor.receive()) == 1
    assert supervisor.receive() == []  # two restarts, the first of which failed
    assert len(supervisor.receive()) == 1
    clock.advance(61.0)
    assert supervisor.receive() == []  # the window is empty again
    (last,) = supervisor.receive()
    assert last.finish_reason is FinishReason.LENGTH
    assert supervisor.num_restarts == 3


def killer(*names: str, alone: bool = True) -> ScriptedClient:
    """An engine that dies of the requests ``names``; with ``alone`` False, only when it has others, too."""
    return ScriptedClient(dies_of=lambda running: bool(running & set(names)) and (alone or len(running) > 1))


def test_a_request_that_kills_alone_fails_alone() -> None:
    made = [killer("poison") for _ in range(4)]
    supervisor = Supervisor(made[0], clients(*made[1:]), VirtualClock(), NO_PAUSE)
    asked = [request("good", max_tokens=20), request("poison"), request("other", n=2, max_tokens=9, seed=8)]
    for one in asked:
        supervisor.send(one)
    reader = Reader()
    reader.read(supervisor, until=4)
    (end,) = reader.ends["poison", 0]
    assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, "internal")
    assert "alone" in (end.error or "")
    assert supervisor.num_restarts == 3
    assert reader.tokens["good", 0] == undisturbed(asked[0])[0]
    for index in range(2):
        assert reader.tokens["other", index] == undisturbed(asked[2])[index]
    assert made[2].most_running == 1, "suspects run one at a time"
    assert supervisor.health().status == "ready"


def test_others_wait_until_suspects_have_run_alone() -> None:
    made = [ScriptedClient(die_after=1), ScriptedClient(die_after=1), ScriptedClient()]
    supervisor = Supervisor(made[0], clients(*made[1:]), VirtualClock(), NO_PAUSE)
    asked = [request(name, max_tokens=30, seed=i) for i, name in enumerate("abc")]
    for one in asked:
        supervisor.send(one)
    reader = Reader()
    reader.read(supervisor, until=3)
    kinds = [
        (type(m).__name__, m.request_id)  # type: ignore[union-attr]
        for m in made[2].sent
    ]
    trials = [(kind, name) for name in "abc" for kind in ("Request", "AbortRequest")]
    assert kinds == [*trials, *(("Request", name) for name in "abc")]
    for one in asked:
        assert reader.tokens[one.request_id, 0] == undisturbed(one)[0]
        assert len(reader.ends[one.request_id, 0]) == 1


def test_a_cleared_suspect_is_not_tried_again_at_once() -> None:
    made = [
        ScriptedClient(die_after=1),
        ScriptedClient(die_after=1),
        ScriptedClient(die_after=8),
        ScriptedClient(),
    ]
    supervisor = Supervisor(made[0], clients(*made[1:]), VirtualClock(), NO_PAUSE)
    supervisor.send(request("a", max_tokens=30))
    reader = Reader()
    reader.read(supervisor, until=1)
    assert [type(m) for m in made[3].sent] == [Request], "one death since it ran alone"
    assert reader.tokens["a", 0] == undisturbed(request("a", max_tokens=30))[0]


def test_backoff_has_a_ceiling_and_is_told() -> None:
    clock = VirtualClock()
    seen = []

    def restart() -> ScriptedClient:
        seen.append(supervisor.health())
        return ScriptedClient(load_error=ModelLoadError("the disk is gone"))

    policy = RestartPolicy(max_restarts=60, backoff_s=1e-4, max_backoff_s=2e-3)
    supervisor = Supervisor(ScriptedClient(die_after=0), restart, clock, policy)
    supervisor.receive()
    assert len(seen) == 60
    assert {health.status for health in seen} == {"restarting"}
    assert "SIGKILL" in (seen[0].reason or "")
    assert "disk is gone" in (seen[-1].reason or "")
    assert [health.num_restarts for health in seen] == list(range(1, 61))
    assert max(health.retry_in_s for health in seen) == pytest.approx(2e-3)
    assert supervisor.health().status == "dead"


def test_a_load_error_at_first_start_is_raised_as_it_is() -> None:
    broken = ScriptedClient(load_error=ModelLoadError("truncated file"))
    with pytest.raises(ModelLoadError, match="truncated"):
        Supervisor(broken, clients(), VirtualClock()).wait_ready()


def test_the_book_forgets_what_is_over() -> None:
    book = InFlight()
    for index in range(100):
        name = f"r{index}"
        book.sent(request(name, n=2))
        book.received([TokenEvent(name, 0, (5,), None, FinishReason.STOP)])
        book.sent(FinishSample(name, 1, 0) if index % 2 else AbortRequest(name))
    assert len(book) == 0
    assert book.fail_all("over") == []


def test_readmission_carries_what_was_delivered() -> None:
    book = InFlight()
    book.sent(request("a", n=3))
    book.received([TokenEvent("a", 0, (1, 2)), TokenEvent("a", 1, (3,), None, FinishReason.STOP)])
    book.received([TokenEvent("unknown", 0, (9,))])
    (message,) = book.readmissions()
    assert isinstance(message, Request)
    assert message.output_token_ids == ((1, 2), (3,), ())
    assert message.finished_samples == (1,)
    rng = random.Random(0)
    rest = [TokenEvent("a", i, (rng.randrange(9),), None, FinishReason.LENGTH) for i in (0, 2)]
    book.received(rest)
    assert book.readmissions() == []


def test_live_settings_survive_a_restart() -> None:
    book = InFlight()
    book.sent(PolicyChange(max_queue=5, order="priority"))
    book.sent(PolicyChange(max_queue=7))
    assert book.readmissions() == [PolicyChange(max_queue=7), PolicyChange(order="priority")]
    before = {"max_queue": 7, "order": "priority", "max_num_seqs": 4}
    book.sent(
        ChangePolicy("0", PolicyChange(max_num_seqs=2, max_queue=9))
    )  # not known yet whether it is accepted
    assert len(book.readmissions()) == 2
    book.answered([Reply("0", {**before, "max_num_seqs": 2}, before), Reply("1", before, error="no")])
    assert book.readmissions()[2:] == [PolicyChange(max_num_seqs=2)]
    # With --slo, a setting that a person pinned is set again, even to an unchanged value; the controller sets the
    # others.
    book.answered([Reply("2", {**before, "max_num_batched_tokens": 64}, pinned=("max_num_batched_tokens",))])
    assert book.readmissions()[2:] == [PolicyChange(max_num_batched_tokens=64)]
    book.answered([Reply("3", before, before, pinned=())])
    assert len(book.readmissions()) == 2


class StrictClient(ScriptedClient):
    """Refuses what cannot cross the wire, as `ProcessClient` does."""

    def send(self, message: Message) -> None:
        super().send(decode(encode(message)))


def test_what_cannot_be_sent_is_not_recorded() -> None:
    supervisor = Supervisor(StrictClient(die_after=2), clients(StrictClient()), VirtualClock(), NO_PAUSE)
    supervisor.send(request("fine"))
    with pytest.raises(OverflowError):
        supervisor.send(replace(request("huge"), terms=Terms(priority=2**64)))
    assert len(supervisor.record) == 1
    reader = Reader()
    reader.read(supervisor, until=1)
    assert supervisor.num_restarts == 1
    assert reader.tokens["fine", 0] == undisturbed(request("fine"))[0]


def test_bad_readmission_fails_alone() -> None:
    """A request that arrives between two engines meets the wire only at the readmission."""
    fresh = StrictClient()

    def restart() -> ScriptedClient:
        supervisor.send(replace(request("huge", n=2), terms=Terms(priority=2**64)))
        supervisor.send(request("late"))
        return fresh

    supervisor = Supervisor(StrictClient(die_after=0), restart, VirtualClock(), NO_PAUSE)
    supervisor.send(request("early"))
    reader = Reader()
    reader.read(supervisor, until=4)
    for index in range(2):
        (end,) = reader.ends["huge", index]
        assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, "internal")
        assert "cannot be sent" in (end.error or "")
    for name in ("early", "late"):
        assert reader.tokens[name, 0] == undisturbed(request(name))[0]
    assert len(supervisor.record) == 0


def hung(overdue_s: float) -> EngineHealth:
    return EngineHealth("hung", "step 7 does not end", overdue_s)


class Silent(ScriptedClient):
    """An engine that sends nothing while it is hung."""

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        return [] if self.now_health.status == "hung" else super().receive(timeout_s)

    answers = True  # under the GIL

    def dump(self, *, is_last: bool = False) -> str:
        if is_last:
            return "stacks by the signal"
        return "plans and stacks" if self.answers else ""


def test_an_engine_that_is_not_watched_may_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = Silent()
    policy = RestartPolicy(backoff_s=0.0, watches_hangs=False)
    supervisor = Supervisor(first, clients(), VirtualClock(), policy)
    first.now_health = hung(1e6)
    assert supervisor.receive(0.0) == []
    assert not first.closed
    assert not default_folder().exists()


def test_an_engine_that_may_go_on_is_never_sent_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal reads stacks that change, which may crash a process that was only late."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = Silent()
    first.answers = False
    policy = RestartPolicy(backoff_s=0.0, hang_timeout_s=10.0)
    supervisor = Supervisor(first, clients(ScriptedClient()), VirtualClock(), policy)
    first.now_health = hung(9.9)
    assert supervisor.receive(0.0) == []
    assert not default_folder().exists()
    first.now_health = hung(10.0)
    assert supervisor.receive(0.0) == []
    (dump,) = default_folder().iterdir()
    assert dump.read_text() == "stacks by the signal"
    assert first.closed


@pytest.mark.parametrize("timeout_s", [0.0, 10.0])
def test_a_hung_engine_is_killed_late_or_never(
    timeout_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first = Silent()
    policy = RestartPolicy(backoff_s=0.0, hang_timeout_s=timeout_s)
    supervisor = Supervisor(first, clients(ScriptedClient()), VirtualClock(), policy)
    supervisor.send(request("a"))
    assert supervisor.receive(0.0) != []
    for overdue_s in (2.0, 9.9):
        first.now_health = hung(overdue_s)
        assert supervisor.receive(0.0) == []
        assert supervisor.health().status == "hung"
        assert not first.closed
    (dump,) = default_folder().iterdir()
    assert dump.read_text() == "plans and stacks"
    first.now_health = hung(1e6 if not timeout_s else 10.0)
    assert supervisor.receive(0.0) == []
    assert first.closed == bool(timeout_s)
    assert supervisor.num_restarts == bool(timeout_s)
    first.now_health = EngineHealth()
    while supervisor.receive(0.0)[0].finish_reason is None:
        pass
