"""The golden prompt: ids of the first start are kept, other ids restart the engine, and clients see nothing of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.scripted import ScriptedClient, clients, token_of
from tests.engine.test_supervisor import NO_PAUSE, Reader, request, undisturbed
from tests.engine.toy import engine_config

from quire.clock import VirtualClock
from quire.engine.guard import NUM_OUTPUT, PREFIX, GoldenPrompt
from quire.engine.supervisor import Supervisor
from quire.errors import EngineDeadError
from quire.request import Request, TokenEvent


class Broken(ScriptedClient):
    """An engine whose answers to golden prompts are wrong, ``times`` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def _step(self) -> list[TokenEvent]:
        return [self._changed(event) for event in super()._step()]

    def _changed(self, event: TokenEvent) -> TokenEvent:
        if not event.request_id.startswith(PREFIX) or not self.left:
            return event
        self.left -= event.finish_reason is not None
        return event._replace(token_ids=(1,))


def supervised(
    folder: Path, first: ScriptedClient, *others: ScriptedClient, clock: VirtualClock | None = None
) -> Supervisor:
    clock = clock or VirtualClock()
    golden = GoldenPrompt(engine_config(), folder, clock, 60.0)
    return Supervisor(first, clients(*others), clock, NO_PAUSE, golden)


def asked_of(client: ScriptedClient) -> list[Request]:
    return [m for m in client.sent if isinstance(m, Request) and m.request_id.startswith(PREFIX)]


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A folder with the ids of a first start."""
    supervised(tmp_path, ScriptedClient()).wait_ready()
    return tmp_path


def test_the_first_start_keeps_the_ids(known: Path) -> None:
    (file,) = known.iterdir()
    kept = json.loads(file.read_text())
    client = ScriptedClient()
    supervised(known, client).wait_ready()
    (asked,) = asked_of(client)
    assert kept == {
        "prompt": list(asked.prompt_token_ids), "ids": [token_of(asked, 0, i) for i in range(NUM_OUTPUT)],
    }  # fmt: skip
    assert asked.sampling.temperature == 0.0


def test_one_failure_is_tried_again(known: Path) -> None:
    client = Broken(1)
    supervisor = supervised(known, client)
    supervisor.wait_ready()
    assert len(asked_of(client)) == 2
    assert asked_of(client)[0].terms.cache_salt != asked_of(client)[1].terms.cache_salt, (
        "nothing comes from the cache"
    )
    assert supervisor.num_restarts == 0
    assert supervisor.health().status == "ready"


def test_two_failures_restart_the_engine(known: Path) -> None:
    supervisor = supervised(known, Broken(99), ScriptedClient())
    supervisor.wait_ready()
    assert supervisor.num_restarts == 1
    assert supervisor.health().status == "ready"


def test_an_engine_that_stays_wrong_is_given_up(known: Path) -> None:
    supervisor = supervised(known, *(Broken(99) for _ in range(4)))
    with pytest.raises(
        EngineDeadError, match=r"wrong answers: the golden prompt failed: its ids are \[1, 1.*delete"
    ):
        supervisor.wait_ready()


def test_an_idle_engine_is_checked_on_a_timer(known: Path) -> None:
    clock, client = VirtualClock(), ScriptedClient()
    supervisor = supervised(known, client, ScriptedClient(), clock=clock)
    supervisor.wait_ready()
    assert supervisor.receive(0.0) == []
    assert len(asked_of(client)) == 1
    clock.advance(61.0)
    assert supervisor.receive(0.0) == []
    assert len(asked_of(client)) == 2
    supervisor.send(request("a"))  # joins the check
    reader = Reader()
    reader.read(supervisor, until=1)
    assert list(reader.tokens) == [("a", 0)], "the check's own events are not delivered"
    assert reader.tokens["a", 0] == undisturbed(request("a"))[0]


def test_a_timer_finds_an_engine_that_went_wrong(known: Path) -> None:
    clock, client = VirtualClock(), Broken(0)
    supervisor = supervised(known, client, ScriptedClient(), clock=clock)
    supervisor.wait_ready()
    client.left = 99
    clock.advance(61.0)
    seen = set()
    for _ in range(60):
        supervisor.receive(0.0)
        seen.add(supervisor.health().status)
    assert seen == {"ready", "unsound"}
    assert supervisor.num_restarts == 1


def test_a_cache_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    supervisor = supervised(tmp_path / "file" / "below", ScriptedClient())
    supervisor.wait_ready()
    assert supervisor.health().status == "ready"


def test_a_change_of_settings_has_ids_of_its_own(tmp_path: Path) -> None:
    make: Callable[..., None] = lambda **fields: supervised_of(tmp_path, **fields)  # noqa: E731
    make()
    make(block_size=32)
    make()
    assert len(list(tmp_path.iterdir())) == 2


def supervised_of(folder: Path, **fields: int) -> None:
    clock = VirtualClock()
    golden = GoldenPrompt(engine_config(**fields), folder, clock, 60.0)
    Supervisor(ScriptedClient(), clients(), clock, NO_PAUSE, golden).wait_ready()
