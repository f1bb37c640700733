"""Short campaigns of faults of tiers; `make faults-kv` runs long ones."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.faults.kv_tier import campaign
from tests.faults.kv_worlds import DiskWorld, PeerWorld, World

from quire.models import loader

WORLDS: dict[str, Callable[[], World]] = {
    "disk": DiskWorld,
    # A peer that answers late here is one that this machine is too busy for.
    "peers": lambda: PeerWorld(hangs=False, timeout_s=30.0),
}


@pytest.mark.parametrize("tier", sorted(WORLDS))
def test_faults_of_a_tier_change_no_token(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "STD", 0.3)
    seed = random.randrange(2**32)
    result = campaign(WORLDS[tier](), 60, seed, quill=False, limit_s=60)
    assert not result.failures, f"seed {seed}"
    assert result.num_loaded > 0, f"seed {seed}"
    assert len(result.seen) > 5, f"seed {seed}"
