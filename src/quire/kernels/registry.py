"""Which implementation of an op runs. Every op names its versions here; an engine chooses once, at build.

    reference   readable torch, exact: the bits of a row depend on nothing but that row (docs/kernels.md)
    avx512, avx2, scalar   C++ (csrc/cpu), one source compiled for each level, exact within a level
    amx         C++ on Intel's matrix tiles, for ops that gain by them; an engine of this level takes avx512 else
    triton      GPU: Triton, and torch's own products; the bits of a row may depend on the batch
    invariant   GPU, for ops where that matters: slower versions whose bits do not (--batch-invariant)

The table is filled at import and never changes afterwards, so two engines with different choices fit in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Backend = Literal["reference", "scalar", "avx2", "avx512", "amx", "triton", "invariant"]
NATIVE_LEVELS: tuple[Backend, ...] = ("amx", "avx512", "avx2", "scalar")
GPU_KERNELS: tuple[Backend, ...] = ("triton", "invariant")  # registered by `kernels.triton_ops` alone
VECTOR_LEVELS: tuple[Backend, ...] = ("avx512", "avx2", "scalar")  # of an op without a version for tiles
F = TypeVar("F", bound=Callable[..., Any])

_TABLE: dict[tuple[str, str], Callable[..., Any]] = {}


def register(op: str, backend: Backend) -> Callable[[F], F]:
    """Decorator: this function is the ``backend`` version of ``op``."""

    def add(function: F) -> F:
        assert (op, backend) not in _TABLE, f"{op}/{backend} is registered twice"
        _TABLE[(op, backend)] = function
        return function

    return add


def find(op: str, backend: Backend) -> Callable[..., Any]:
    """Return the ``backend`` version of ``op``; both must be registered."""
    assert (op, backend) in _TABLE, f"no {backend} version of {op}; there are {sorted(_TABLE)}"
    return _TABLE[(op, backend)]


def backends(op: str) -> list[Backend]:
    """Versions of ``op`` that run on this CPU, for tests and benchmarks that go over all of them."""
    return [backend for name, backend in sorted(_TABLE) if name == op and backend not in GPU_KERNELS]  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The versions one engine uses, best first; an op takes the first of them that it has."""

    order: tuple[Backend, ...]

    def backend(self, op: str) -> Backend:
        for backend in self.order:
            if (op, backend) in _TABLE:
                return backend
        raise AssertionError(f"{op} has no version among {self.order}")

    def describe(self) -> dict[str, Backend]:
        """Return op → version, for `quire doctor` and the start-up log."""
        return {op: self.backend(op) for op in sorted({name for name, _ in _TABLE})}


def choose(isa: str = "reference") -> KernelChoice:
    """Return the choice of an engine: native kernels of level ``isa`` where there are any, else torch.

    "triton" and "invariant" are a GPU's; `kernels.triton_ops` must be imported for them.
    """
    if isa in GPU_KERNELS:
        return KernelChoice((*(("invariant",) if isa == "invariant" else ()), "triton", "reference"))
    native: tuple[Backend, ...] = tuple(level for level in NATIVE_LEVELS if level == isa)
    if isa == "amx":
        native = ("amx", "avx512")
    return KernelChoice((*native, "reference"))
