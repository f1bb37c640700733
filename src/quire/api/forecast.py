"""`TtftForecast`: when a request's first token will come, by the engine's predictor and the prompts ahead.

The requests ahead are those of this server that have no token yet. How long their steps take is the engine's to say
(`EngineStats.ttft`). What the prefix cache holds is not known here. Belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.metrics.engine_stats import EngineStats
from quire.workload.slo import Slo


class Ticket:
    """One prompt on its way. Call `first` at its first token and `leave` at its end; later calls count for nothing."""

    __slots__ = ("_forecast", "num_tokens", "predicted_s", "state")

    def __init__(self, forecast: TtftForecast, num_tokens: int, predicted_s: float) -> None:
        self._forecast = forecast
        self.num_tokens = num_tokens
        self.predicted_s = predicted_s
        self.state = "waiting"  # then "decoding", then "gone"

    def first(self, measured_s: float) -> float:
        """The first token came ``measured_s`` after arrival. Return measured / predicted."""
        if self.state == "waiting":
            self.state = "decoding"
            self._forecast.started(self.num_tokens)
        return measured_s / self.predicted_s

    def leave(self) -> None:
        """The request is over, however it ended."""
        if self.state != "gone":
            self._forecast.left(self.num_tokens, waiting=self.state == "waiting")
            self.state = "gone"


class TtftForecast:
    """Counts the prompts ahead of a new one."""

    def __init__(self, slo: Slo, stats: Callable[[], EngineStats]) -> None:
        self.slo = slo
        self._stats = stats
        self._tokens_ahead = 0  # prompt tokens of requests without a token
        self._num_decoding = 0

    def enter(self, num_prompt_tokens: int) -> Ticket:
        """A request was sent to the engine; its ticket knows the prediction."""
        busy = bool(self._num_decoding or self._tokens_ahead)
        predicted_s = self._stats().ttft.seconds(self._tokens_ahead, num_prompt_tokens, busy=busy)
        self._tokens_ahead += num_prompt_tokens
        return Ticket(self, num_prompt_tokens, predicted_s)

    def started(self, num_tokens: int) -> None:
        self._tokens_ahead -= num_tokens
        self._num_decoding += 1

    def left(self, num_tokens: int, *, waiting: bool) -> None:
        if waiting:
            self._tokens_ahead -= num_tokens
        else:
            self._num_decoding -= 1
