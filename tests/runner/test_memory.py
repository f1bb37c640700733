"""KV storage: every layer has its place, and what is not touched costs nothing."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from tests.runner.tiny import MAX_LEN, SPECS

from quire.clock import WallClock
from quire.errors import ConfigError
from quire.kernels import registry
from quire.kernels.threads import BetweenSteps
from quire.runner import memory
from quire.runner.memory import KvCache, PagesAhead, torch_dtype


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("name", SPECS)
def test_pages_hold_every_layer_once(name: str) -> None:
    """Views of a group's layers tile the page; groups share pages."""
    spec = SPECS[name]
    layout = spec.kv_layout(MAX_LEN)
    cache = KvCache(spec, layout, 5, 16, "float32", registry.choose())
    for group in layout.groups:
        cache.storage.zero_()
        for count, layer in enumerate(group.layers):
            assert cache.views[layer].pieces.abs().sum() == 0, "layers of a group overlap"
            cache.views[layer].pieces.fill_(count + 1)
        share = len(group.layers) / layout.layers_per_block
        assert (cache.storage != 0).float().mean() == pytest.approx(share)


def test_untouched_pages_cost_nothing() -> None:
    spec = SPECS["llama"]
    layout = spec.kv_layout(MAX_LEN)
    num_blocks = (2 << 30) // layout.block_bytes(16, "bfloat16")
    before = resident_bytes()
    cache = KvCache(spec, layout, num_blocks, 16, "bfloat16", registry.choose())
    assert cache.storage.nbytes > 0.99 * (2 << 30)
    assert resident_bytes() - before < 32 << 20
    cache.clear([0, num_blocks - 1])
    cache.copy([(0, num_blocks // 2)])
    assert cache.storage[num_blocks // 2].abs().sum() == 0
    assert resident_bytes() - before < 64 << 20


@pytest.fixture
def cache() -> KvCache:
    """256 MiB and a little."""
    spec = SPECS["llama"]
    layout = spec.kv_layout(MAX_LEN)
    num_blocks = (256 << 20) // layout.block_bytes(16, "bfloat16") + 1
    return KvCache(spec, layout, num_blocks, 16, "bfloat16", registry.choose())


def pages_ahead(cache: KvCache, between: BetweenSteps, num_bytes: int) -> PagesAhead:
    """As many bytes ahead as that."""
    return PagesAhead(cache, between, num_bytes // memory.AHEAD_STEPS // cache.token_bytes)


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives pages on request")


@needs_linux
def test_pages_come_before_they_are_used(cache: KvCache) -> None:
    between, before = BetweenSteps(WallClock()), resident_bytes()
    pages = pages_ahead(cache, between, 64 << 20)
    pages.look()
    pages.join()
    assert 60 << 20 < resident_bytes() - before < 72 << 20
    pages.look()  # as many as are wanted
    assert pages.thread is not None
    assert not pages.thread.is_alive()
    cache.note_used([5, cache.storage.shape[0] // 2, 7])
    pages.look()
    pages.join()
    assert 120 << 20 < resident_bytes() - before < 140 << 20, "another 64 MiB, and none of those skipped"
    cache.note_used([cache.storage.shape[0] - 1])
    pages.look()
    pages.join()
    assert resident_bytes() - before < 140 << 20


@needs_linux
def test_no_page_comes_while_a_step_runs(cache: KvCache) -> None:
    between, before = BetweenSteps(WallClock()), resident_bytes()
    between.step_begins()
    pages = pages_ahead(cache, between, 64 << 20)
    pages.look()
    time.sleep(0.2)
    assert resident_bytes() - before < 4 << 20
    between.step_ended()
    pages.join()
    assert resident_bytes() - before > 60 << 20


@needs_linux
def test_an_engine_that_ends_does_not_wait_for_pages(cache: KvCache) -> None:
    between = BetweenSteps(WallClock())
    between.step_begins()
    pages = pages_ahead(cache, between, 64 << 20)
    pages.look()
    between.close()
    pages.join()


@needs_linux
def test_what_is_written_stays_when_pages_come(cache: KvCache) -> None:
    """Blocks that a step writes meanwhile, and blocks that nobody said were used."""
    values = torch.arange(cache.storage[:, 0].numel(), dtype=torch.float32).to(torch.bfloat16)
    half = len(values) // 2
    cache.storage[:half, 0] = values[:half]
    pages = pages_ahead(cache, BetweenSteps(WallClock()), 256 << 20)
    pages.look()
    cache.storage[half:, 0] = values[half:]
    pages.join()
    assert torch.equal(cache.storage[:, 0], values)


def test_a_system_without_the_call_is_asked_once(cache: KvCache, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(PagesAhead, "_populate", lambda self, begin, size: asked.append(begin))
    pages = pages_ahead(cache, BetweenSteps(WallClock()), 64 << 20)
    for _ in range(3):
        pages.look()
        pages.join()
    assert len(asked) == (sys.platform == "linux")


def test_unknown_dtype() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ConfigError, match="float7"):
        torch_dtype("float7")
