"""A step recorded once and replayed for every step: the native calls of a forward, without Python between them.

Recording runs the Python of a forward at the largest shape that a step may have, and none of its kernels (csrc/tape.h).
It notes each native call with its addresses. A replay is one call, with the step's numbers of tokens and logits rows.

That is sound only where native calls write every byte of the forward. So a recording watches torch: an operation that
makes new data, rather than another view of memory, ends the recording with `NotRecordable`, and so does a native call
whose rows are neither the step's tokens nor its logits. Nothing is guessed; such a model runs call by call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.kernels.registry import native
from quire.kernels.threads import num_native_threads
from quire.kernels.workspace import Arena, allocating_in


class NotRecordable(Exception):
    """The forward does something that a replay would not do; the text says what."""


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
        self.native = native.Tape()
        self.native.start(tokens=max_tokens, logits=max_logits)
        try:
            with allocating_in(self._arena), _OnlyViews():  # type: ignore[no-untyped-call]
                self.output = forward()  # [max_logits, ...]: where every replay leaves its result
        except RuntimeError as error:  # from a native call
            raise NotRecordable(str(error)) from error
        finally:
            self.native.stop()

    def __len__(self) -> int:
        return len(self.native)

    @property
    def num_bytes(self) -> int:
        """Memory that the largest step would use."""
        return self._arena.num_bytes

    def run(self, num_tokens: int, num_logits: int) -> torch.Tensor:
        """Compute a step and return its rows of `output`, which the next replay overwrites."""
        self.native.run(num_native_threads(), num_tokens, num_logits)
        return self.output[:num_logits]

    def run_timed(self, num_tokens: int, num_logits: int) -> dict[str, float]:
        """Compute a step and return the seconds of each of its ops, for benchmarks."""
        seconds: dict[str, float] = {}
        for name, taken in self.run_calls(num_tokens, num_logits):
            seconds[name] = seconds.get(name, 0.0) + taken
        return seconds

    def run_calls(self, num_tokens: int, num_logits: int) -> list[tuple[str, float]]:
        """Compute a step as `run` and return the op and the seconds of each native call, in order."""
        return [
            (mangled.removesuffix("E").rpartition("cpu")[2].lstrip("0123456789").removesuffix("Args"), taken)
            for mangled, taken in self.native.run_timed(num_native_threads(), num_tokens, num_logits)
        ]


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
