"""`TtftForecast`: when a request's first token will come, from the step-time model and who is ahead.

Prompts ahead and the own one are computed in chunks beside the decodes, as large as the SLO's controller lets them be.
The requests ahead are those of this server that have no token yet. What the prefix cache holds is not known here, and
neither is the machine's mood: predictions are scaled by what the last ones turned out to be. Belongs to one event loop.
"""

from __future__ import annotations

import math

from quire.config import SchedulerConfig
from quire.plan.cost_model import StepTime
from quire.scheduler.slo import MEMORY, SloController
from quire.workload.slo import Slo


class Ticket:
    """One prompt on its way. Call `first` at its first token and `leave` at its end, each at most once that matters."""

    __slots__ = ("_forecast", "_raw_s", "num_tokens", "predicted_s", "state")

    def __init__(self, forecast: TtftForecast, num_tokens: int, raw_s: float, predicted_s: float) -> None:
        self._forecast = forecast
        self._raw_s = raw_s
        self.num_tokens = num_tokens
        self.predicted_s = predicted_s
        self.state = "waiting"  # then "decoding", then "gone"

    def first(self, measured_s: float) -> float:
        """The first token came ``measured_s`` after arrival. Return measured / predicted."""
        if self.state == "waiting":
            self.state = "decoding"
            self._forecast.started(self.num_tokens, measured_s / self._raw_s)
        return measured_s / self.predicted_s

    def leave(self) -> None:
        """The request is over, however it ended."""
        if self.state != "gone":
            self._forecast.left(self.num_tokens, waiting=self.state == "waiting")
            self.state = "gone"


class TtftForecast:
    """Predicts, and learns from what came."""

    def __init__(self, step_time: StepTime, config: SchedulerConfig, slo: Slo) -> None:
        self.slo = slo
        self._controller = SloController(step_time, config, slo.tpot_s or math.inf)
        self._max_num_seqs = config.max_num_seqs
        self._tokens_ahead = 0  # prompt tokens of requests without a token
        self._num_decoding = 0
        self._ratio = 1.0

    def enter(self, num_prompt_tokens: int) -> Ticket:
        """A request was sent to the engine; its ticket knows the prediction."""
        raw_s = self._seconds(num_prompt_tokens)
        self._tokens_ahead += num_prompt_tokens
        return Ticket(self, num_prompt_tokens, raw_s, raw_s * self._ratio)

    def started(self, num_tokens: int, ratio: float) -> None:
        self._tokens_ahead -= num_tokens
        self._num_decoding += 1
        self._ratio += (min(max(ratio, 0.05), 20.0) - self._ratio) * MEMORY

    def left(self, num_tokens: int, *, waiting: bool) -> None:
        if waiting:
            self._tokens_ahead -= num_tokens
        else:
            self._num_decoding -= 1

    def _seconds(self, num_tokens: int) -> float:
        """Half of the step in flight, then as many steps as the tokens ahead and the own ones take."""
        decodes = min(self._num_decoding, self._max_num_seqs - 1)
        chunk = max(1, self._controller.chunk(decodes))
        todo = max(1, self._tokens_ahead + num_tokens)
        full, rest = divmod(todo - 1, chunk)
        seconds = full * self._controller.mixed_s(decodes, chunk) + self._controller.mixed_s(
            decodes, rest + 1
        )
        if decodes or self._tokens_ahead:
            seconds += self._controller.mixed_s(decodes, min(chunk, max(1, self._tokens_ahead))) / 2
        return max(seconds, 1e-6)
