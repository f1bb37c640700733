"""KV storage: every layer has its place, and what is not touched costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runner.tiny import MAX_LEN, SPECS

from quire.errors import ConfigError
from quire.kernels import registry
from quire.runner.memory import KvCache, torch_dtype


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


def test_unknown_dtype() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(ConfigError, match="float7"):
        torch_dtype("float7")
