"""The TTFT forecast: who is ahead, what is learned, the header and the histogram."""

from __future__ import annotations

import pytest
from tests.api.asgi_client import Api

from quire.api.app import create_app
from quire.api.forecast import TtftForecast
from quire.api.settings import ApiSettings
from quire.config import SchedulerConfig
from quire.cost.cost_model import CostModel, Curve
from quire.metrics.engine_stats import EngineStats
from quire.scheduler.policies.forecast import ModelledPredictor
from quire.scheduler.policies.slo import SloController
from quire.slo import Slo

MODEL = CostModel(0.01, Curve((0.0, 1.0), (0.0, 1e-4)))  # 10 ms a step, 0.1 ms a row
CONFIG = SchedulerConfig(max_num_batched_tokens=500, max_num_seqs=8, max_model_len=8192)


def stats(num_decodes: int = 0, budget: int = 500) -> EngineStats:
    return EngineStats(ttft=ModelledPredictor(CONFIG, MODEL).ttft_stats(num_decodes, budget))


def test_alone_a_prompt_takes_its_steps() -> None:
    ticket = TtftForecast(Slo(), stats).enter(1000)
    assert ticket.predicted_s == pytest.approx(2 * 0.01 + 0.1)


def test_who_is_ahead_counts_until_its_first_token() -> None:
    forecast = TtftForecast(Slo(), stats)
    first = forecast.enter(1000)
    second = forecast.enter(1000)
    assert second.predicted_s == pytest.approx(4 * 0.01 + 0.2 + (0.01 + 0.05) / 2)
    second.leave()
    assert first.first(first.predicted_s) == 1.0
    first.leave()
    first.leave()  # once is enough
    assert forecast.enter(1000).predicted_s == pytest.approx(first.predicted_s)


def test_a_short_prompt_waits_for_a_share_of_long_ones() -> None:
    def shared() -> EngineStats:
        return EngineStats(ttft=ModelledPredictor(CONFIG, MODEL).ttft_stats(0, 500, 100))

    forecast = TtftForecast(Slo(), shared)
    alone = forecast.enter(30)
    long, another = forecast.enter(5000), forecast.enter(4000)
    assert another.predicted_s > (5000 + 4000) * 1e-4
    short = forecast.enter(30)
    assert short.predicted_s == pytest.approx(0.01 + (60 + 7) * 1e-4 + (0.01 + 0.01) / 2)
    long.first(1.0)
    for each in (alone, another, short, long):
        each.leave()
    assert forecast.enter(30).predicted_s == pytest.approx(alone.predicted_s)


def test_an_slo_makes_chunks_smaller_and_waits_longer() -> None:
    controller = SloController(ModelledPredictor(CONFIG, MODEL), CONFIG, 0.02)
    budget = 1 + controller.chunk(1)  # beside one decode
    free, held = TtftForecast(Slo(), lambda: stats(1)), TtftForecast(Slo(), lambda: stats(1, budget))
    assert held.enter(1000).predicted_s > free.enter(1000).predicted_s


def test_it_learns_from_what_came() -> None:
    predictor = ModelledPredictor(CONFIG, MODEL)
    forecast = TtftForecast(Slo(), lambda: EngineStats(ttft=predictor.ttft_stats(0, 500)))
    before = forecast.enter(100)
    before.leave()
    for _ in range(80):
        ticket = forecast.enter(100)
        predictor.note_ttft(ticket.predicted_s, 3 * before.predicted_s)
        ticket.leave()
    assert forecast.enter(100).predicted_s == pytest.approx(3 * before.predicted_s, rel=0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_every_answer_carries_the_prediction(stream: bool) -> None:
    api = Api()
    forecast = TtftForecast(Slo(tpot_s=0.02), stats)
    api.app = create_app(api.frontend, ApiSettings(), forecast=forecast)  # type: ignore[arg-type]
    predicted_ms = float(api.complete(stream=stream).headers["x-quire-predicted-ttft-ms"])
    assert predicted_ms == pytest.approx(1e3 * (0.01 + len("hi") * 1e-4), abs=0.06)
    api.chat(stream=stream)
    metrics = api.call("GET", "/metrics").text
    assert 'quire:ttft_prediction_ratio_count{engine="0",model_name="tiny"} 2.0' in metrics
    assert forecast.enter(1000).predicted_s > 0.1  # nobody is ahead any more, and nobody decodes


def test_without_an_slo_there_is_no_prediction() -> None:
    assert "x-quire-predicted-ttft-ms" not in Api().complete().headers
