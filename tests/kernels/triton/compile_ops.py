"""Compile, without a GPU, every kernel that the ops of the case table launch: `python compile_ops.py 90`.

A stand-in for the driver names the target; launches are replaced by compilations down to the GPU's machine code, so
that a type that the interpreter does not mind, or shared memory that a multiprocessor does not have, is found here. A
kernel whose launch overlaps the one before must wait before it touches memory that others write
(`kernels.triton_overlap`).
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
from quire.kernels.triton_overlap import BEFORE_WAIT

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
                names = [each for each, kind in kernel.src.signature.items() if kind != "constexpr"]
                check_wait(self.__name__, kernel.asm["ptx"], names)
            compiled[self.__name__] = compiled.get(self.__name__, 0) + 1

    JITFunction.run = compile_only  # type: ignore[method-assign]
    return compiled


def check_wait(name: str, ptx: str, arguments: list[str]) -> None:
    """Before the one wait nothing is written, and addresses that are read come from the arguments that may be."""
    body = ptx[ptx.index(".entry") :]
    pointers = {f"{name}_param_{i}" for i in map(int, re.findall(r"\.ptr [^\n]*_param_(\d+)", body))}
    assert body.count("griddepcontrol.wait") == 1, name
    sources: dict[str, set[str]] = {}  # register → what the instructions that set it name
    read: set[str] = set()
    for line in body[body.index("{") : body.index("griddepcontrol.wait")].splitlines():
        found = re.match(r"\s*(?:@!?%\w+ )?([a-z][\w.]*)\s+(.+);", line)
        if found is None or found[1].startswith(("bra", "ret", "prefetch")):
            continue
        operation, operands = found.groups()
        assert re.match(r"(st\.global|cp\.async|atom|red)\.", operation) is None, (
            f"{name}: {line} before the wait"
        )
        target, _, rest = operands.partition("}," if operands.startswith("{") else ",")
        for register in re.findall(r"%\w+", target):
            sources.setdefault(register, set()).update(re.findall(r"%\w+|\w+_param_\d+", rest))
        if operation.startswith("ld.global"):
            read.update(re.findall(r"%rd\w+", rest[rest.index("[") :]))
    reached, ahead = set(), read
    while ahead:
        reached |= ahead
        ahead = set().union(*(sources.get(each, set()) for each in ahead)) - reached
    named = {arguments[int(each.rsplit("_", 1)[1])] for each in reached & pointers}
    assert named <= BEFORE_WAIT.get(name, set()), f"{name} reads by {sorted(named)} before the wait"


if __name__ == "__main__":
    compiled = compile_launches(int(sys.argv[1]))
    from tests.kernels.triton.launches import launch_all

    launch_all(int(sys.argv[1]))
    for name, count in sorted(compiled.items()):
        print(f"{name}: {count}")
