"""`TtftForecast`: when a request's first token will arrive, from the step-time model and the requests ahead of it.

The requests ahead are those of this server that have no token yet. Their prompts and the new one are computed in chunks
beside the decodes, as large as the SLO's controller allows. The state of the prefix cache and the speed of the machine
are not known here, so predictions are scaled by the ratio of measured to predicted times. Belongs to one event loop.
"""

from __future__ import annotations

import math

from quire.config import SchedulerConfig
from quire.plan.cost_model import StepTime
from quire.scheduler.slo import MEMORY, SloController
from quire.workload.slo import Slo


class Ticket:
    """A prompt in the engine. Call `first` at its first token and `leave` at its end; repeated calls change nothing."""

    __slots__ = ("_forecast", "_raw_s", "num_tokens", "predicted_s", "state")

    def __init__(self, forecast: TtftForecast, num_tokens: int, raw_s: float, predicted_s: float) -> None:
        self._forecast = forecast
        self._raw_s = raw_s
        self.num_tokens = num_tokens
        self.predicted_s = predicted_s
        self.state = "waiting"  # then "decoding", then "gone"

    def first(self, measured_s: float) -> float:
        """Note that the first token came ``measured_s`` after arrival; return measured / predicted."""
        if self.state == "waiting":
            self.state = "decoding"
            self._forecast.started(self.num_tokens, measured_s / self._raw_s)
        return measured_s / self.predicted_s

    def leave(self) -> None:
        """Note that the request has ended, for whatever reason."""
        if self.state != "gone":
            self._forecast.left(self.num_tokens, waiting=self.state == "waiting")
            self.state = "gone"


class TtftForecast:
    """Predicts times to first token, and corrects itself by the measured ones."""

    def __init__(self, step_time: StepTime, config: SchedulerConfig, slo: Slo) -> None:
        self.slo = slo
        self._controller = SloController(step_time, config, slo.tpot_s or math.inf)
        self._max_num_seqs = config.max_num_seqs
        self._tokens_ahead = 0  # prompt tokens of requests without a token
        self._num_decoding = 0
        self._ratio = 1.0

    def enter(self, num_prompt_tokens: int) -> Ticket:
        """Note a request that was sent to the engine; its ticket has the prediction."""
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
        """Return half of the step in flight, plus the steps for the tokens ahead and the request's own."""
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
