"""Compile, without a GPU, every kernel that the ops of the case table launch: `python compile_ops.py 90`.

A stand-in for the driver names the target; launches are replaced by compilations down to the GPU's machine code, so
that a type that the interpreter does not mind, or shared memory that a multiprocessor does not have, is found here. A
kernel whose launch overlaps the one before must wait before it touches memory (`kernels.triton_overlap`).
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from quire.kernels import triton_overlap

SHARED_BYTES = {80: 166_912, 90: 232_448}  # that a program may have


@dataclass
class Target:
    """What `JITFunction.run` asks of a driver before it launches."""

    capability: int

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compile_launches(capability: int) -> dict[str, int]:
    """From here on a launch compiles; returns kernel → number of variants, filled as they come."""
    driver.set_active(Target(capability))
    triton_overlap.overlaps = lambda: capability >= 90  # type: ignore[assignment]
    compiled: dict[str, int] = {}
    seen: set[str] = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            shared = kernel.metadata.shared
            assert shared <= SHARED_BYTES[capability], f"{self.__name__}: {shared} bytes of shared memory"
            assert kernel.asm["cubin"]
            if kernel.metadata.launch_pdl:
                check_wait(self.__name__, kernel.asm["ptx"])
            compiled[self.__name__] = compiled.get(self.__name__, 0) + 1

    JITFunction.run = compile_only  # type: ignore[method-assign]
    return compiled


def check_wait(name: str, ptx: str) -> None:
    """No access to memory but parameters and prefetches stands before the one wait."""
    body = ptx[ptx.index(".entry") :]
    assert body.count("griddepcontrol.wait") == 1, name
    before = body[: body.index("griddepcontrol.wait")]
    found = re.search(r"\b(ld\.global|st\.global|cp\.async|atom|red)\.", before)
    assert found is None, f"{name}: {found[0]} before the wait"


if __name__ == "__main__":
    compiled = compile_launches(int(sys.argv[1]))
    from tests.kernels.triton.launches import launch_all

    launch_all(int(sys.argv[1]))
    for name, count in sorted(compiled.items()):
        print(f"{name}: {count}")
