"""A tensor that was read can leave the process's memory, and comes back as it was."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.models.safetensors_file import read_safetensors


def resident_kib(path: Path) -> int:
    """Resident size of the mappings of a file."""
    smaps = Path("/proc/self/smaps").read_text()
    entries = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", smaps)
    return sum(int(re.findall(r"Rss:\s+(\d+) kB", entry)[0]) for entry in entries if str(path) in entry)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_go_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {"big": torch.randn(1 << 20), "small": torch.randn(3)}
    save_file(tensors, path)
    stored = read_safetensors(path)
    view = torch.frombuffer(
        stored["big"].buffer, dtype=torch.float32, count=1 << 20, offset=stored["big"].offset
    )
    assert torch.equal(view, tensors["big"])
    assert resident_kib(path) > 4000
    stored["big"].unmap_pages()
    stored["small"].unmap_pages()  # less than a page: nothing to give back
    assert resident_kib(path) < 200
    assert torch.equal(view, tensors["big"])
