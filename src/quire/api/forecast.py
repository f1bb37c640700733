"""`TtftForecast`: predicts a prompt's time to its first token from the prompts ahead of it (``--slo``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.metrics.engine_stats import EngineStats
from quire.slo import Slo


@dataclass(slots=True, eq=False)
class Ticket:
    """One prompt on its way. Call `first` at its first token and `leave` at its end; later calls count for nothing."""

    _forecast: TtftForecast
    num_tokens: int
    is_long: bool
    predicted_s: float
    state: str = "waiting"  # then "decoding", then "gone"

    def first(self, measured_s: float) -> float:
        """The first token came ``measured_s`` after arrival. Return measured / predicted."""
        if self.state == "waiting":
            self.state = "decoding"
            self._forecast.started(self)
        return measured_s / self.predicted_s

    def leave(self) -> None:
        """The request is over, however it ended."""
        if self.state != "gone":
            self._forecast.left(self, waiting=self.state == "waiting")
            self.state = "gone"


class TtftForecast:
    """Counts the prompts ahead of a new one."""

    def __init__(self, slo: Slo, stats: Callable[[], EngineStats]) -> None:
        self.slo = slo
        self._stats = stats
        # Prompt tokens of requests that have no token yet: of short prompts, and of long ones.
        self._ahead = [0, 0]
        self._num_decoding = 0

    def enter(self, num_prompt_tokens: int) -> Ticket:
        """A request was sent to the engine; its ticket knows the prediction."""
        stats, (num_short, num_long) = self._stats().ttft, self._ahead
        busy = bool(self._num_decoding or num_short or num_long)
        predicted_s = stats.seconds(num_short, num_prompt_tokens, busy=busy, num_long=num_long)
        is_long = num_prompt_tokens > stats.long_tokens > 0
        self._ahead[is_long] += num_prompt_tokens
        return Ticket(self, num_prompt_tokens, is_long, predicted_s)

    def started(self, ticket: Ticket) -> None:
        self._ahead[ticket.is_long] -= ticket.num_tokens
        self._num_decoding += 1

    def left(self, ticket: Ticket, *, waiting: bool) -> None:
        if waiting:
            self._ahead[ticket.is_long] -= ticket.num_tokens
        else:
            self._num_decoding -= 1
