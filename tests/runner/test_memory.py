"""KV bytes: budgets, limits of the machine, storage that costs nothing until it is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runner.tiny import MAX_LEN, SPECS

from quire.errors import ConfigError
from quire.kernels import registry
from quire.runner.memory import KvCache, available_bytes, num_blocks_of, torch_dtype


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("name", SPECS)
def test_pages_hold_every_layer_once(name: str) -> None:
    """Views of a group's layers tile the page; groups share pages."""
    spec = SPECS[name]
    layout = spec.kv_layout(MAX_LEN)
    cache = KvCache(spec, layout, 5, 16, "float32", registry.choose(exact=True))
    for group in layout.groups:
        cache.storage.zero_()
        for count, layer in enumerate(group.layers):
            assert cache.views[layer].pieces.abs().sum() == 0, "layers of a group overlap"
            cache.views[layer].pieces.fill_(count + 1)
        share = len(group.layers) / layout.layers_per_page
        assert (cache.storage != 0).float().mean() == pytest.approx(share)


def test_untouched_pages_cost_nothing() -> None:
    spec = SPECS["llama"]
    layout = spec.kv_layout(MAX_LEN)
    num_blocks = num_blocks_of(2 << 30, layout, 16, "bfloat16")
    before = resident_bytes()
    cache = KvCache(spec, layout, num_blocks, 16, "bfloat16", registry.choose(exact=True))
    assert cache.storage.nbytes > 0.99 * (2 << 30)
    assert resident_bytes() - before < 32 << 20
    cache.clear([0, num_blocks - 1])
    cache.copy([(0, num_blocks // 2)])
    assert cache.storage[num_blocks // 2].abs().sum() == 0
    assert resident_bytes() - before < 64 << 20


def test_num_blocks() -> None:
    layout = SPECS["llama"].kv_layout(MAX_LEN)
    page = layout.page_bytes(16, "float32")
    assert page == 2 * 2 * 24 * 16 * 4
    assert num_blocks_of(10 * page + 1, layout, 16, "float32") == 10
    assert num_blocks_of(page - 1, layout, 16, "float32") == 0
    assert num_blocks_of(-5, layout, 16, "float32") == 0


def test_available_is_the_lesser_of_machine_and_cgroup(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:    2000 kB\n")
    assert available_bytes(meminfo, tmp_path) == 2_048_000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert available_bytes(meminfo, tmp_path) == 2_048_000
    (tmp_path / "memory.max").write_text("1000\n")
    assert available_bytes(meminfo, tmp_path) == 995
    (tmp_path / "memory.current").write_text("5000\n")
    assert available_bytes(meminfo, tmp_path) == 0


def test_unknown_dtype() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ConfigError, match="float7"):
        torch_dtype("float7")
