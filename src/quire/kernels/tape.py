"""A step recorded once and replayed for every step: the native calls of a forward, without Python between them.

Recording runs the Python of a forward at the largest shape that a step may have, and none of its kernels (csrc/tape.h).
It notes each native call with its addresses. A replay is one call, with the step's numbers of tokens and logits rows.

That is sound only where native calls write every byte of the forward. So a recording watches torch: an operation that
makes new data, rather than another view of memory, ends the recording with `NotRecordable`, and so does a native call
whose rows are neither the step's tokens nor its logits. Nothing is guessed; such a model runs call by call.

A collective over a network is no native call. It cuts the recording: a replay runs the native calls before it, then the
collective from Python, then those behind it (`between_segments`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.clock import WallClock
from quire.kernels.registry import native
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import Arena, allocating_in


class NotRecordable(Exception):
    """The forward does something that a replay would not do; the text says what."""


Counts = tuple[int, int]  # tokens of a step, rows that give logits


class _Cut(NamedTuple):
    """What runs between two segments: ``call(x, y)`` on the first rows of memory that the segments use too."""

    call: Callable[[torch.Tensor, torch.Tensor], None]
    x: torch.Tensor
    y: torch.Tensor
    kind: int  # index into `Counts`
    when: Callable[[], bool] | None  # None: always

    def run(self, counts: Counts) -> None:
        if (rows := counts[self.kind]) and (self.when is None or self.when()):
            self.call(self.x[:rows], self.y[:rows])


class StepTape:
    """``forward()`` is called once, here; it works on tensors of ``max_tokens`` and ``max_logits`` rows.

    The two must differ, because they tell the rows of a call apart. What ``forward`` reads must not move while the tape
    lives.

    Raises:
        NotRecordable: the forward is not native throughout.
    """

    def __init__(self, forward: Callable[[], torch.Tensor], max_tokens: int, max_logits: int) -> None:
        if native is None or not hasattr(native, "Tape"):
            raise NotRecordable("the native extension is not built")
        self.max_tokens = max_tokens
        self.max_logits = max_logits
        self._arena = Arena()
        self._segments = [native.Tape()]
        self._cuts: list[_Cut] = []  # after each segment but the last
        self._start()
        token = _recording.set(self)
        try:
            with allocating_in(self._arena), _OnlyViews():  # type: ignore[no-untyped-call]
                self.output = forward()  # [max_logits, ...]: where every replay leaves its result
        except RuntimeError as error:  # from a native call
            raise NotRecordable(str(error)) from error
        finally:
            _recording.reset(token)
            self._segments[-1].stop()

    def __len__(self) -> int:
        return sum(map(len, self._segments)) + len(self._cuts)

    @property
    def native(self) -> Any:
        """The recorded calls; None where they are cut into segments."""
        return None if self._cuts else self._segments[0]

    @property
    def num_bytes(self) -> int:
        """Memory that the largest step would use."""
        return self._arena.num_bytes

    def cut(
        self, call: Callable[[torch.Tensor, torch.Tensor], None], x: torch.Tensor, y: torch.Tensor,
        when: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        """Record ``call(x, y)``, whose rows are the step's tokens or its logits, and begin another segment."""
        limits = (self.max_tokens, self.max_logits)
        if x.shape[0] not in limits:
            raise NotRecordable(f"a collective has {x.shape[0]} rows, which no step has")
        self._segments[-1].stop()
        self._cuts.append(_Cut(call, _unowned(x), _unowned(y), limits.index(x.shape[0]), when))
        self._segments.append(native.Tape())
        self._start()

    def run(self, num_tokens: int, num_logits: int) -> torch.Tensor:
        """Compute a step and return its rows of `output`, which the next replay overwrites."""
        threads = num_native_threads()
        for segment, cut in zip(self._segments, (*self._cuts, None), strict=True):
            segment.run(threads, num_tokens, num_logits)
            if cut is not None:
                cut.run((num_tokens, num_logits))
        return self.output[:num_logits]

    def run_timed(self, num_tokens: int, num_logits: int) -> dict[str, float]:
        """Compute a step and return the seconds of each of its ops, for benchmarks."""
        seconds: dict[str, float] = {}
        for name, taken in self.run_calls(num_tokens, num_logits):
            seconds[name] = seconds.get(name, 0.0) + taken
        return seconds

    def run_calls(self, num_tokens: int, num_logits: int) -> list[tuple[str, float]]:
        """Compute a step as `run` and return the op and the seconds of each call, in order."""
        times: list[tuple[str, float]] = []
        clock = WallClock()
        for segment, cut in zip(self._segments, (*self._cuts, None), strict=True):
            times += [
                (
                    mangled.removesuffix("E").rpartition("cpu")[2].lstrip("0123456789").removesuffix("Args"),
                    taken,
                )
                for mangled, taken in segment.run_timed(num_native_threads(), num_tokens, num_logits)
            ]
            if cut is not None:
                start_s = clock.now()
                cut.run((num_tokens, num_logits))
                times.append(("Network", clock.now() - start_s))
        return times

    def _start(self) -> None:
        self._segments[-1].start(tokens=self.max_tokens, logits=self.max_logits)


_recording: ContextVar[StepTape | None] = ContextVar("recording", default=None)


def between_segments(
    call: Callable[[torch.Tensor, torch.Tensor], None], x: torch.Tensor, y: torch.Tensor,
    when: Callable[[], bool] | None = None,
) -> bool:  # fmt: skip
    """Record ``call(x, y)`` as what runs between two segments; False: nothing is being recorded.

    ``when``: whether it has to run, asked at each replay; None: always.
    """
    tape = _recording.get()
    if tape is not None:
        tape.cut(call, x, y, when)
    return tape is not None


def _unowned(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the same memory that does not keep it: the arena may use it again, as for a native call."""
    assert x.stride(1) == 1, x.stride()
    num_elements = (x.shape[0] - 1) * x.stride(0) + x.shape[1]
    memory = (ctypes.c_uint8 * (num_elements * x.dtype.itemsize)).from_address(x.data_ptr())
    return torch.frombuffer(memory, dtype=x.dtype).as_strided(x.shape, x.stride())


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allows only torch operations that return views of their arguments and write nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's default, True, would import torch._dynamo at the first operation: a second per start."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)
        }
        made = tree_leaves(result)
        views = all(_is_tensor(leaf) and leaf.untyped_storage().data_ptr() in known for leaf in made)
        if func._schema.is_mutable or not views:
            raise NotRecordable(f"torch's {func} computes in the middle of it")
        return result


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)
