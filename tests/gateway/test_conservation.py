"""The sums of the ledger are the engines' own although every gateway is killed once. 20,000 requests: the benchmark."""

from __future__ import annotations

import pytest
from benchmarks.conservation import COUNTERS, conservation
from benchmarks.gateway_books import full_disk, is_right, two_ledgers


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ledger_has_what_the_engines_computed() -> None:
    found = conservation(600, 3, 2, timed=True)
    assert found["clients"]["kills"] == 3
    assert {name: found["ledger"][name] for name in COUNTERS} == found["engines"]
    assert (found["ledger"]["unsettled"], found["outcomes"]["recovered"] > 0) == (0, True)
    assert sum(line["output_tokens"] for line in found["tenants"]) == found["engines"]["output_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ledgers_over_the_same_replicas_stay_apart() -> None:
    found = two_ledgers(200, 2)
    assert [client["kills"] for client in found["clients"]] == [2, 2]
    assert is_right(found), found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_ledger_on_a_disk_that_fills_has_every_answer() -> None:
    try:
        found = full_disk(100, 1)
    except PermissionError as error:
        pytest.skip(str(error))
    assert found["clients"][0]["ledger_full"] > 0
    assert is_right(found), found
