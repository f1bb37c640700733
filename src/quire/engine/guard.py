"""`EngineGuard`: what a supervisor looks at while it receives from an engine: is it late, and are its answers right?"""

from __future__ import annotations

import tempfile

from quire.engine.client import EngineClient
from quire.engine.golden import GoldenPrompt
from quire.errors import EngineDeadError
from quire.metrics.log import Log
from quire.request import TokenEvent

_LOOK_S = 0.25  # between two looks at an engine that sends nothing
log = Log("supervisor")


class EngineGuard:
    """Receives from an engine, and looks whether it hangs and whether its answers are right.

    ``timeout_s``: beyond the predicted end of a step; 0: no engine is given up for being late.
    """

    def __init__(self, timeout_s: float, golden: GoldenPrompt | None = None) -> None:
        self._timeout_s = timeout_s
        self._golden = golden
        self._is_hung = False

    @property
    def problem(self) -> str | None:
        """What is wrong with the engine's answers."""
        return None if self._golden is None else self._golden.problem

    def check(self, client: EngineClient) -> None:
        """Wait until the golden prompt has passed in an engine that has just loaded, and has no requests.

        Raises:
            EngineDeadError: it failed twice, or the engine died of it.
        """
        if self._golden is None:
            return
        self._golden.forget()
        self._golden.begin(client)
        while self._golden.is_running and client.health().status != "dead":
            self.receive(client, None)

    def receive(self, client: EngineClient, timeout_s: float | None) -> list[TokenEvent]:
        """As `EngineClient.receive`, for a quarter of a second at most.

        Raises:
            EngineDeadError: the engine has died, or is to be replaced, since it was late for too long or gives wrong
                answers.
        """
        events = self._receive(client, timeout_s)
        return events if self._golden is None else self._golden.look(client, events)

    def _receive(self, client: EngineClient, timeout_s: float | None) -> list[TokenEvent]:
        events = client.receive(_LOOK_S if timeout_s is None else min(timeout_s, _LOOK_S))
        health = client.health()
        if health.status != "hung":
            if self._is_hung and health.status == "ready":
                log.warning("engine_goes_on")
            self._is_hung = False
            return events
        if not self._is_hung:
            self._is_hung = True
            log.error("engine_hangs", reason=health.reason)
            log.error("engine_dump", file=_keep(client.dump()))
        if self._timeout_s and health.overdue_s >= self._timeout_s and not events:
            self._is_hung = False
            raise EngineDeadError(f"The engine hung and was killed: {health.reason}.")
        return events


def _keep(dump: str) -> str:
    """Write what a hung engine said to a file that stays; return its path, or why there is none."""
    if not dump:
        return "none: the process is stopped, or does not answer signals"
    try:
        with tempfile.NamedTemporaryFile("w", prefix="quire-hang-", suffix=".txt", delete=False) as file:
            file.write(dump)
    except OSError as error:
        return f"none: {error}"
    return file.name
