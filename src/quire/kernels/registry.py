"""Which version of an op runs. Every op names its versions here; an engine chooses once, when it is built.

    reference   readable torch, exact: the bits of a row depend on that row alone (docs/kernels.md)
    avx512, avx512_vnni, avx512_bw, avx2, scalar    C++ (csrc/cpu), one source for all levels, exact within each
    neon_i8mm, neon                                 the same on Arm
    amx         C++ on Intel's matrix tiles, for ops that gain by them; the other ops of such an engine run avx512
    triton      GPU: Triton, and torch's own products; the bits of a row may depend on the batch
    invariant   GPU, for ops where that matters: slower versions whose bits do not (--batch-invariant)

The table is filled at import and never changes afterwards, so two engines with different choices fit in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

from quire.config import RunnerConfig

try:
    from quire import _native as native
except ImportError:  # no compiler at install
    native = None  # type: ignore[assignment]

__all__ = [
    "GPU_KERNELS", "NATIVE_LEVELS", "VECTOR_LEVELS", "Backend", "KernelChoice", "Op", "backends", "choose", "find",
    "in_words", "native", "op", "register", "register_native",
]  # fmt: skip
Backend = Literal[
    "reference", "scalar", "avx2", "avx512_bw", "avx512_vnni", "avx512", "amx", "neon", "neon_i8mm",
    "triton", "invariant",
]  # fmt: skip
VECTOR_LEVELS: tuple[Backend, ...] = (
    "avx512", "avx512_vnni", "avx512_bw", "avx2", "neon_i8mm", "neon", "scalar",
)  # fmt: skip
NATIVE_LEVELS: tuple[Backend, ...] = ("amx", *VECTOR_LEVELS)  # with tiles
GPU_KERNELS: tuple[Backend, ...] = ("triton", "invariant")  # registered by `kernels.triton_ops` alone
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")

_TABLE: dict[tuple[str, str], Callable[..., Any]] = {}


def register(op: str, *backends: Backend) -> Callable[[F], F]:
    """Decorator: this function is the version of ``op`` of each of ``backends``."""

    def add(function: F) -> F:
        for backend in backends:
            assert (op, backend) not in _TABLE, f"{op}/{backend} is registered twice"
            _TABLE[(op, backend)] = function
        return function

    return add


def register_native(
    op: str, levels: tuple[Backend, ...] = VECTOR_LEVELS, *, takes_level: bool = True
) -> Callable[[F], F]:
    """Decorator: this function is the version of ``op`` at those of ``levels`` that the CPU has.

    ``takes_level``: its first argument is the level. Without the native extension nothing is registered.
    """

    def add(function: F) -> F:
        for level in levels:
            if native is not None and native.has_isa(level):
                register(op, level)(partial(function, level) if takes_level else function)
        return function

    return add


def find(op: str, backend: Backend) -> Callable[..., Any]:
    """Return the ``backend`` version of ``op``; both must be registered."""
    assert (op, backend) in _TABLE, f"no {backend} version of {op}; there are {sorted(_TABLE)}"
    return _TABLE[(op, backend)]


class Op(Generic[P, R]):
    """An op: its contract is the signature and the docstring of its reference, which a call runs.

    The other versions take the same arguments (a native one, in front of them, the level).
    """

    def __init__(self, name: str, reference: Callable[P, R]) -> None:
        self.name = name
        # What a reference calls of another op: its plain function.
        self.reference = register(name, "reference")(reference)
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.reference(*args, **kwargs)

    def on(self, backend: Backend) -> Callable[P, R]:
        """Return the version of ``backend``, which must be registered."""
        return find(self.name, backend)

    def version(self, *backends: Backend) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator: this function is the version of each of ``backends``."""
        return register(self.name, *backends)

    def native(
        self, levels: tuple[Backend, ...] = VECTOR_LEVELS
    ) -> Callable[[Callable[Concatenate[str, P], R]], Callable[Concatenate[str, P], R]]:
        """Decorator: this function, given the level, is the version of those of ``levels`` that the CPU has."""
        return register_native(self.name, levels)


def op(name: str) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Decorator: this function is the contract and the reference of the op ``name``."""
    return partial(Op, name)


def backends(op: str) -> list[Backend]:
    """Versions of ``op`` that run on this CPU, for tests and benchmarks that go over all of them."""
    return [backend for name, backend in sorted(_TABLE) if name == op and backend not in GPU_KERNELS]  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The versions that one engine uses, best first; an op takes the first of them that it has."""

    order: tuple[Backend, ...]

    def backend(self, op: str) -> Backend:
        for backend in self.order:
            if (op, backend) in _TABLE:
                return backend
        raise AssertionError(f"{op} has no version among {self.order}")

    def of(self, op: Op[P, R]) -> Callable[P, R]:
        """Return the version of ``op`` that the engine uses."""
        return op.on(self.backend(op.name))

    def describe(self) -> dict[str, Backend]:
        """Return op → version, for `quire doctor` and the start-up log."""
        return {op: self.backend(op) for op in sorted({name for name, _ in _TABLE})}


def choose(runner: RunnerConfig | None = None) -> KernelChoice:
    """Return the choice of an engine; None is the reference. A GPU's needs `kernels.triton_ops` to be imported."""
    if runner is None or runner.backend == "reference":
        return KernelChoice(("reference",))
    if runner.backend == "triton":
        return KernelChoice((*(("invariant",) if runner.batch_invariant else ()), "triton", "reference"))
    levels = tuple(level for level in NATIVE_LEVELS if level == runner.isa)
    assert levels, runner
    return KernelChoice((*levels, *(("avx512",) if runner.isa == "amx" else ()), "reference"))


def in_words(config: RunnerConfig) -> str:
    """Return which kernels run: "amx linear; avx512 attention; reference (torch) for the rest; 2 threads"."""
    chosen = choose(config).describe()
    parts = []
    for level in NATIVE_LEVELS:
        ops = sorted({op.split(".")[0] for op, backend in chosen.items() if backend == level})
        parts += [f"{level} {', '.join(ops)}"] if ops else []
    torch = sorted({backend for backend in chosen.values() if backend not in NATIVE_LEVELS})
    parts += [f"{' and '.join(torch)} (torch)" + (" for the rest" if parts else "")] if torch else []
    return "; ".join([*parts, f"{config.num_threads} threads"])
