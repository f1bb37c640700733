"""Sequences whose blocks come from a tier give what they give alone: logits bitwise, whatever the tier loses."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.exact.engine_run import Policy
from tests.exact.suite import Case, serve_and_check
from tests.fakes.tiers import DictStore, SteppedMover

from quire.clock import WallClock
from quire.engine.kv_tier import mover_of
from quire.kernels.registry import backends
from quire.models import loader
from quire.tiers.disk import DiskStore
from quire.tiers.memory import MemoryStore
from quire.tiers.peer import Peer
from quire.tiers.peer_server import PeerServer
from quire.tiers.peers import PeerStore

LEVEL = backends("attention")[-1]
CASES = [
    Case("llama", "float32", 61, 24),
    Case("sliding", "float32", 62, 24),
    Case("moe", "bfloat16", 63, 24, LEVEL),
    Case("latent", "bfloat16", 64, 24, LEVEL),
    Case("per_layer", "bfloat16", 65, 24, LEVEL, kv_dtype="int8"),
    Case("llama", "bfloat16", 66, 24, LEVEL, kv_dtype="int8"),
    Case("llama", "bfloat16", 67, 24, LEVEL, kv_dtype="int4"),
    Case("hybrid", "float32", 70, 24),
    Case("parallel", "bfloat16", 71, 24, LEVEL),
]
FCFS = Policy("continuous", "fcfs", 48)


@pytest.fixture(autouse=True)
def lively_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "STD", 0.3)


@pytest.mark.parametrize("loss", [0.0, 0.1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_of_a_tier_are_the_same_bits(case: Case, loss: float) -> None:
    """The second engine finds what the first one stored, as after a restart."""
    store = DictStore(loss, case.seed)
    first = serve_and_check(case, FCFS, mover_of=lambda executor: SteppedMover(executor, store, 3, case.seed))
    second = serve_and_check(
        case, FCFS, mover_of=lambda executor: SteppedMover(executor, store, 3, case.seed + 1)
    )
    assert first.tally.num_stored > 0
    assert second.tally.num_loaded > 0
    assert (store.num_lost > 0) == (loss > 0.0)


@pytest.mark.parametrize("drafts", ["other", "oracle"])
def test_drafts_go_on_behind_loaded_blocks(drafts: str) -> None:
    case, store = Case("llama", "float32", 67, 24), DictStore()
    policy = Policy("continuous", "fcfs", 48, drafts)  # type: ignore[arg-type]
    for seed in (1, 2):
        run = serve_and_check(
            case, policy, mover_of=lambda executor, seed=seed: SteppedMover(executor, store, 2, seed)
        )  # type: ignore[misc]
    assert run.tally.num_loaded > 0
    assert run.tally.num_accepted > 0


def test_steps_that_fail_take_their_transfers_along() -> None:
    case, store, movers = Case("llama", "float32", 68, 24), DictStore(), []
    for seed in (1, 2):

        def make(executor: object, seed: int = seed) -> SteppedMover:
            movers.append(SteppedMover(executor, store, 2, seed))  # type: ignore[arg-type]
            return movers[-1]

        run = serve_and_check(case, FCFS, fail_every=7, mover_of=make)
        assert run.tally.num_failures > 0
    assert run.tally.num_loaded > 0
    assert sum(mover.num_cancelled for mover in movers) > 0


@pytest.mark.parametrize("case", [CASES[3], CASES[5]], ids=str)
def test_a_peer_gives_the_same_bits(case: Case) -> None:
    """Over a connection and with threads; the giver drops blocks while the taker asks for them."""
    root, secret = "0" * 32, b"the secret of two engines"
    given = MemoryStore(64 << 20, root)
    server = PeerServer(given, ("127.0.0.1", 0), root, secret, bytes(16))
    store = PeerStore(given, server, [])
    serve_and_check(case, FCFS, mover_of=lambda executor: mover_of(executor, store, WallClock()))
    peer = Peer(("127.0.0.1", server.port), root, secret, follows=False, timeout_s=20.0)
    peer.follow(once=True)
    for key in given.changes(0, 0.0).added[::7]:
        given.read([key], [memoryview(bytearray(1))])  # of another size, so it is dropped
    taker = PeerStore(MemoryStore(64 << 20, root), None, [peer])
    run = serve_and_check(case, FCFS, mover_of=lambda executor: mover_of(executor, taker, WallClock()))
    for each in (taker, store):
        each.close()
    assert run.tally.num_loaded > 0
    assert peer.counts.blocks_lost > 0


def test_a_disk_and_threads_give_the_same_bits(tmp_path: Path) -> None:
    case = Case("llama", "bfloat16", 69, 24, LEVEL)
    for _ in range(2):
        store = DiskStore(tmp_path / "kv", 64 << 20, "0" * 32)
        run = serve_and_check(case, FCFS, mover_of=lambda executor: mover_of(executor, store, WallClock()))  # noqa: B023
        store.close()
    assert run.tally.num_loaded > 0
