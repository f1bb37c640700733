"""Every metric that the dashboard and the alerts name is one that /metrics exposes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.metrics.engine_stats import EngineStats
from quire.metrics.prometheus import Exposition
from quire.metrics.server import ServerMetrics
from quire_gateway.books import Bookkeeping
from quire_gateway.config import HealthArgs
from quire_gateway.config_file import gateway_config
from quire_gateway.fleet import Fleet
from quire_gateway.metrics import GatewayMetrics
from quire_gateway.retries import RetryBudget
from quire_gateway.routing import Router

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
_NAME = re.compile(r"\b(?:(?:vllm|quire):\w+|process_\w+)")
_FOREIGN = {"up"}  # Prometheus' own


def exposed() -> set[str]:
    metrics = ServerMetrics("m", EngineStats, lambda: {"block_size": 16})
    metrics.response("/v1/completions", 200)
    request = metrics.request(0.0, n=1, max_tokens=3, prompt_tokens=2)
    request.admitted(0.1)
    request.chunk(0, 1, 0.2)
    request.finish(0, "stop", 0.3)
    text = Exposition(metrics).page()[0].decode()
    return {s.name for family in text_string_to_metric_families(text) for s in family.samples}


def dashboard_expressions() -> Iterator[str]:
    board = json.loads((DEPLOY / "grafana" / "quire.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]


def alert_expressions() -> Iterator[str]:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]


def exposed_by_a_gateway(folder: Path) -> set[str]:
    metrics = GatewayMetrics(Fleet(Router("round-robin"), HealthArgs(), Random(0)), RetryBudget(0.2, 10))
    bookkeeping = Bookkeeping(gateway_config({"ledger": str(folder / "ledger.sqlite")}), lambda: 0.0)
    bookkeeping.start()
    metrics.stages = [bookkeeping]
    text = metrics.exposition("")[0].decode()
    bookkeeping.books.close()
    return {s.name for family in text_string_to_metric_families(text) for s in family.samples}


@pytest.mark.parametrize("expressions", [dashboard_expressions, alert_expressions])
def test_every_metric_exists(expressions: object, tmp_path: Path) -> None:
    known, named = exposed() | exposed_by_a_gateway(tmp_path), 0
    for expression in expressions():  # type: ignore[operator]
        names = set(_NAME.findall(expression)) - _FOREIGN
        named += len(names)
        assert names <= known, f"{expression}: {names - known}"
        assert expression.count("(") == expression.count(")")
    assert named >= 5


def test_bounds_that_a_query_names_are_bounds() -> None:
    text = Exposition(ServerMetrics("m", EngineStats)).page()[0].decode()
    for expression in dashboard_expressions():
        for metric, bound in re.findall(r'(\S+_bucket)\{[^}]*le="([^"]+)"', expression.replace("rate(", "")):
            name = metric.rpartition("(")[2]
            assert re.search(rf'^{re.escape(name)}\{{.*le="{bound}"', text, re.MULTILINE), (name, bound)


def test_the_documented_metrics_are_those_that_are_there() -> None:
    documented = set(
        re.findall(r"^\| `((?:vllm|quire):\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE)
    )
    bare = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exposed() if ":" in name}
    assert documented == bare


class Scraped:
    """What Prometheus' functions say of a histogram of ours whose observations all came in the last five minutes."""

    def __init__(self, *observations: tuple[float, int]) -> None:
        self.histogram = ServerMetrics("m", EngineStats).histograms["vllm:time_to_first_token_seconds"]
        for value, times in observations:
            self.histogram.observe(value, times)

    def quantile(self, share: float) -> float:
        """As `histogram_quantile`: linear inside a bucket; in the last one, its lower bound."""
        wanted, lower, before = share * self.histogram.count, 0.0, 0.0
        for bound, total in self.histogram.cumulative():
            if total >= wanted and total > before:
                upper = float(bound)
                if math.isinf(upper):
                    return lower
                return lower + (upper - lower) * (wanted - before) / (total - before)
            lower, before = float(bound), total
        return lower

    def fires(self, expression: str) -> bool:
        """Whether an alert's expression has a value, for the few functions that ours use of `TTFT`."""
        rates = r"sum by \(le, instance\) \(rate\(vllm:time_to_first_token_seconds_bucket\[5m\]\)\)"
        text = re.sub(rf"histogram_quantile\(([\d.]+), {rates}\)", r"quantile(\1)", expression)
        count = "sum by (instance) (increase(vllm:time_to_first_token_seconds_count[5m]))"
        text = text.replace(count, "count")
        assert re.fullmatch(r"(quantile\([\d.]+\)|count|and|[\d.]+|[>=*]|\s)+", text), text
        return bool(eval(text, {"quantile": self.quantile, "count": self.histogram.count}))


@pytest.mark.parametrize(
    ("observations", "fires"),
    [
        ([(0.05, 900), (6.0, 100)], True),  # one in ten waits 120 times as long
        ([(0.05, 90), (6.0, 9)], False),  # 99 requests
        ([(0.05, 90), (6.0, 10)], True),
        ([(0.02, 9000), (1.5, 1000)], False),  # 75 times as long, and within the SLO
        ([(3.0, 500), (6.0, 500)], False),  # all are slow alike: another alert's
        ([(0.05, 10_000)], False),
        ([], False),
    ],
)
def test_unfair_waits_alert_beside_the_slo_alone(observations: list[tuple[float, int]], fires: bool) -> None:
    assert Scraped(*observations).fires(expression_of("QuireUnfairWaits")) == fires


def test_the_slo_of_unfair_waits_is_a_bound() -> None:
    bounds = [bound for bound, _ in Scraped().histogram.cumulative()]
    (slo,) = re.findall(r"> ([\d.]+)\s+and sum", expression_of("QuireUnfairWaits"))
    assert slo in bounds


def expression_of(alert: str) -> str:
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return next(
        rule["expr"] for group in rules["groups"] for rule in group["rules"] if rule["alert"] == alert
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (of Prometheus) is not installed")
def test_promtool_accepts_the_rules() -> None:
    command = ["promtool", "check", "rules", str(DEPLOY / "prometheus" / "alerts.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_reads_its_files() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert config["scrape_configs"][0]["metrics_path"] == "/metrics"
    for name in config["rule_files"]:
        assert (DEPLOY / "prometheus" / name).is_file()
