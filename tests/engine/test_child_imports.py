"""What the engine process leaves out of torch is not needed, and can be had later."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from quire.engine.child import _no_meta_kernels
assert "torch" not in sys.modules
with _no_meta_kernels():
    import quire.executor.local
assert "torch._refs" not in sys.modules
assert "torch._meta_registrations" not in sys.modules
import torch
from torch import _meta_registrations
assert len(dir(_meta_registrations)) > 100
assert (torch.ones(3, 4, device="meta") @ torch.ones(4, 5, device="meta")).shape == (3, 5)
with _no_meta_kernels():
    pass
assert sys.modules["torch._meta_registrations"] is _meta_registrations
"""


def test_meta_kernels_are_imported_when_they_are_asked_for() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
