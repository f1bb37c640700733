"""Every metric that the dashboard and the alerts name is one that /metrics exposes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from quire.metrics.engine_stats import EngineStats
from quire.metrics.prometheus import ServerMetrics

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
    text = metrics.exposition()[0].decode()
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


@pytest.mark.parametrize("expressions", [dashboard_expressions, alert_expressions])
def test_every_metric_exists(expressions: object) -> None:
    known, named = exposed(), 0
    for expression in expressions():  # type: ignore[operator]
        names = set(_NAME.findall(expression)) - _FOREIGN
        named += len(names)
        assert names <= known, f"{expression}: {names - known}"
        assert expression.count("(") == expression.count(")")
    assert named >= 5


def test_bounds_that_a_query_names_are_bounds() -> None:
    text = ServerMetrics("m", EngineStats).exposition()[0].decode()
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


def test_prometheus_reads_its_files() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    assert config["scrape_configs"][0]["metrics_path"] == "/metrics"
    for name in config["rule_files"]:
        assert (DEPLOY / "prometheus" / name).is_file()
