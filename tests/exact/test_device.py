"""The same promise of a GPU's kernels with --batch-invariant, in Triton's interpreter, with two steps in flight."""

from __future__ import annotations

import pytest
from tests.exact.engine_run import Policy
from tests.exact.suite import Case, serve_and_check
from tests.kernels.triton.device import WARNINGS

from quire.models import loader

pytestmark = [WARNINGS, pytest.mark.triton_interpret, pytest.mark.slow]
CASES = [
    (Case("llama", "bfloat16", 51, num_requests=6, cpu_isa="invariant", max_prompt=60, max_output=5), 32),
    (Case("sliding", "float32", 52, num_requests=6, cpu_isa="invariant", max_prompt=60, max_output=5), 2048),
]


@pytest.mark.parametrize(("case", "budget"), CASES, ids=["llama", "sliding"])
def test_everyone_together_equals_each_one_alone(
    case: Case, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "STD", 0.3)
    tally = serve_and_check(case, Policy("continuous", "fcfs", budget)).tally
    assert tally.num_cached_tokens > 0
    assert tally.num_draws > 0
    print(f"\n{case}: {tally}")
