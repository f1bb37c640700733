"""Every tensor with a NaN or an infinity is found, with its counts and the first place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.models import safetensors_file
from quire.models.safetensors_file import not_finite, read_safetensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_not_finite_is_named(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "PIECE_BYTES", 28)  # so that a tensor is read in several parts
    largest = torch.finfo(dtype).max
    tensors = {
        "fine": torch.tensor([0.0, -0.0, largest, -largest, torch.finfo(dtype).tiny], dtype=dtype),
        "nan": torch.ones(5, 4, dtype=dtype),
        "both": torch.zeros(3, 8, dtype=dtype),
        "scalar": torch.tensor(torch.inf, dtype=dtype),
        "ids": torch.zeros(3, dtype=torch.uint8) + 255,
    }
    tensors["nan"][4, 1] = torch.nan
    tensors["both"][1, 2], tensors["both"][2, 7], tensors["both"][2, 3] = -torch.inf, torch.inf, torch.nan
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    found = {bad.name: (bad.num_nan, bad.num_inf, bad.first) for bad in not_finite(read_safetensors(path))}
    assert found == {"nan": (1, 0, (4, 1)), "both": (1, 2, (1, 2)), "scalar": (0, 1, ())}
