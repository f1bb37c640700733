"""A short campaign of faults of the tier on disk; `make faults-kv` runs a long one."""

from __future__ import annotations

import random

import pytest
from tests.faults.kv_tier import campaign

from quire.models import loader


def test_faults_of_the_disk_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "STD", 0.3)
    seed = random.randrange(2**32)
    result = campaign(60, seed, quill=False, limit_s=60)
    assert not result.failures, f"seed {seed}"
    assert result.num_loaded > 0, f"seed {seed}"
    assert len(result.seen) > 5, f"seed {seed}"
