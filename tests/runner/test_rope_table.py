"""Rotary tables are computed as far as a step reads them, with the bits of a table that is computed at once."""

from __future__ import annotations

import pytest
import torch

from quire.layers.rope import RopeTable, inverse_frequencies
from quire.rope_spec import RopeSpec

LENGTH = 20_000
SPECS = {
    "default": RopeSpec(dim=64, theta=500_000.0),
    "odd": RopeSpec(dim=6, theta=10_000.0),
    "yarn": RopeSpec(dim=32, theta=10_000.0, kind="yarn", factor=4.0, original_max_position=4096, attention_factor=1.1),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_pieces_have_the_bits_of_the_whole(name: str) -> None:
    spec = SPECS[name]
    table = RopeTable(spec, LENGTH, on_demand=True)
    for num_positions in (1, 8192, 8193, 8193, LENGTH + 5):
        table.cover(num_positions)
    angles = torch.arange(len(table.cos), dtype=torch.float32).unsqueeze(1) * inverse_frequencies(
        spec, LENGTH
    )
    table.cover()
    assert torch.equal(table.cos, angles.cos() * spec.attention_factor)
    assert torch.equal(table.sin, angles.sin() * spec.attention_factor)
    assert torch.equal(RopeTable(spec, LENGTH).sin, table.sin)


def test_a_table_covers_what_a_step_asks_for() -> None:
    table = RopeTable(SPECS["default"], LENGTH, on_demand=True)
    table.cover(100)
    assert table.sin[99].any()
    assert not table.cos[-1].any(), "nothing is computed before a step reads it"
