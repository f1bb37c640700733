"""The shares of benchmarks/jsonschemabench.py that the project promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import jsonschemabench


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_shares(shared_data: Path) -> None:
    shares = jsonschemabench.run(shared_data / "conformance" / "jsonschemabench_maskbench.jsonl.gz")
    print(jsonschemabench.report(shares))
    assert len(shares.compiled) + shares.refusals.total() == shares.num_schemas, "none dropped silently"
    assert len(shares.compiled) >= 0.90 * shares.num_schemas
    assert shares.invalid_kept_out >= 0.995 * shares.invalid
    assert shares.sampled == 400
    assert shares.finished >= 0.60 * shares.sampled
    assert shares.finished_valid == shares.finished
