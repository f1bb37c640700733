"""What the page shows of a gateway, from what `/admin/…` says."""

from __future__ import annotations

import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

from quire_lab.cockpit.operate import Sightings, table, tables_of

CARD = {
    "name": "one", "state": "ready", "breaker": "closed", "region": None, "requests": 3, "queued_tokens": 1200,
    "ttft_ms_per_token": 0.5, "models": ["quill"], "why": "",
}  # fmt: skip
ROUTING = {
    "policy": "prefix-predicted",
    "retries": {"taken": 2},
    "served": {"quill": ["one"]},
    "regions": None,
}


def test_a_column_that_says_nothing_is_left_out() -> None:
    (_, replicas), (_, routing) = tables_of({"data": [CARD]}, ROUTING, {"quotas": []})
    assert "1,200" in replicas
    assert "region" not in replicas
    assert "why" not in replicas
    assert "prefix-predicted" in routing


def test_tenants_are_shown_where_there_are_quotas() -> None:
    quotas = [{"tenant": "guests", "left": 5}]
    shown = dict(tables_of({"data": [CARD]}, ROUTING, {"quotas": quotas}))
    assert "guests" in shown["Keys and tenants"]


def test_what_a_replica_says_is_text_in_the_page() -> None:
    assert "<script>" not in table(["name"], [["<script>alert(1)</script>"]])


def test_a_replica_that_is_gone_is_grey_and_says_for_how_long() -> None:
    sightings = Sightings()
    assert sightings.note([CARD], 100.0)[0]["state"] == "ready"
    gone = CARD | {"state": "unready", "why": "refused"}
    assert sightings.note([gone], 102.0)[0]["state"] == "unready for 0 s"
    cards = sightings.note([gone], 114.0)
    assert cards[0]["state"] == "unready for 12 s"
    (_, replicas), _ = tables_of({"data": cards}, ROUTING, None)
    assert '<tr class="gone">' in replicas
    assert sightings.note([CARD], 120.0)[0]["state"] == "ready"


def test_a_replica_that_was_gone_before_says_no_time() -> None:
    assert Sightings().note([CARD | {"state": "unready"}], 1.0)[0]["state"] == "unready"
