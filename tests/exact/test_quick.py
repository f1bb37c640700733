"""The exactness suite in small, for a first look and for `tools/mutants.py`: seconds instead of minutes."""

from __future__ import annotations

import pytest
from tests.exact.engine_run import Drafting, Policy
from tests.exact.suite import Case, at_level, serve_and_check

from quire.kernels.registry import backends
from quire.models import loader

CASES = [
    (Case("llama", "float32", 46, num_requests=24), Policy("continuous", "fcfs", 48)),
    (Case("sliding", "float32", 47, num_requests=24), Policy("continuous", "priority", 256)),
]


# Gemma 4's layers and recurrent ones: with torch, and natively where the cache lies in tiles.
CASES += [
    (
        Case(model, "float32" if level == "reference" else "bfloat16", 49, 24, level),
        Policy("continuous", "fcfs", 48),
    )
    for model in (
        "per_layer",
        "beside_experts",
        "hybrid",
        "channel_decays",
        "side_by_side",
        "convolutions",
        "mamba",
        "parallel",
        "blocks",
    )
    for level in backends("attention")
]


# Heads of two sizes in a cache of codes, whose scales lie beside them.
CASES += [
    (Case("per_layer", "bfloat16", 49, 24, level, kv_dtype=kv_dtype), Policy("continuous", "fcfs", 48))
    for level in backends("attention")[-1:]
    for kv_dtype in ("int8", "int8/int4", "int4")
]


@pytest.mark.parametrize(
    ("case", "policy"), [at_level(case.cpu_isa, case, policy) for case, policy in CASES], ids=str
)
def test_quick(case: Case, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "STD", 0.3)
    tally = serve_and_check(case, policy).tally
    assert tally.num_preemptions > 0
    assert tally.num_forks > 0
    assert tally.num_moves > 0
    assert tally.num_cached_tokens > 0


# Of eight seeds the one in which drafts read K and V of copied blocks.
OWN_DRAFT = [Case(model, "float32", 53, num_requests=24) for model in ("llama", "sliding")]
# A cache in tiles, where a store clears what lies behind it, and sequences that share blocks the draft model lacks.
OWN_DRAFT += [
    Case(model, "bfloat16", 1, num_requests=24, cpu_isa=level)
    for model in ("llama", "sliding")
    for level in backends("attention")
    if level != "reference"
]


@pytest.mark.parametrize("case", [at_level(case.cpu_isa, case) for case in OWN_DRAFT], ids=str)
def test_quick_with_the_model_as_its_own_draft(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """No draft is rejected, whatever preemptions, forks and prefix hits do to the blocks."""
    monkeypatch.setattr(loader, "STD", 0.3)
    tally = serve_and_check(case, Policy("continuous", "fcfs", 48, "self")).tally
    assert tally.num_accepted > 50
    assert tally.num_rejected == 0
    assert tally.num_forks > 0
    assert tally.num_cached_tokens > 0


@pytest.mark.parametrize(("drafts", "accepted"), [("oracle", 50), ("lookahead", 1)])
def test_quick_with_drafts(drafts: Drafting, accepted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are trees of up to three paths; those of lookahead decoding have five."""
    monkeypatch.setattr(loader, "STD", 0.3)
    case = Case("llama", "float32", 48, num_requests=24)
    tally = serve_and_check(case, Policy("continuous", "fcfs", 48, drafts)).tally
    assert tally.num_accepted > accepted
    assert tally.num_rejected > 50


# A recurrent state has no place for a tree, and is no draft model's: another model drafts for it.
STATES = [Case("hybrid", "float32", 49, num_requests=24)]
STATES += [Case("hybrid", "bfloat16", 49, 24, level) for level in backends("attention")[-1:]]


@pytest.mark.parametrize("drafts", ["oracle", "other"])
@pytest.mark.parametrize("case", STATES, ids=str)
def test_quick_with_states_that_go_back(
    case: Case, drafts: Drafting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "STD", 0.3)
    tally = serve_and_check(case, Policy("continuous", "fcfs", 48, drafts)).tally
    assert tally.num_rejected > 50
    assert tally.num_accepted > (50 if drafts == "oracle" else -1)
    assert tally.num_cached_tokens > 0


def test_quick_with_medusa_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE and MTP are in tests/speculate/test_heads_state.py."""
    monkeypatch.setattr(loader, "STD", 0.3)
    case = Case("sliding", "float32", 47, num_requests=16)
    tally = serve_and_check(case, Policy("continuous", "fcfs", 48, "medusa")).tally
    assert tally.num_rejected > 50
    assert tally.num_preemptions > 0
