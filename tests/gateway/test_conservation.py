"""The sums of the ledger are the engines' own although every gateway is killed once. 20,000 requests: the benchmark."""

from __future__ import annotations

import pytest
from benchmarks.conservation import COUNTERS, conservation


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_ledger_has_what_the_engines_computed() -> None:
    found = conservation(600, 3, 2, timed=True)
    assert found["clients"]["kills"] == 3
    assert {name: found["ledger"][name] for name in COUNTERS} == found["engines"]
    assert (found["ledger"]["unsettled"], found["outcomes"]["recovered"] > 0) == (0, True)
    assert sum(line["output_tokens"] for line in found["tenants"]) == found["engines"]["output_tokens"]
