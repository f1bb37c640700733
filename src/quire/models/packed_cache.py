"""Quantized weights kept on disk as they lie in memory, so that the next start reads them and rounds and packs nothing.

`CheckpointWeights` are the weights of a checkpoint: its quantized matrices from the file of `packed_file`, where there
is one for this very checkpoint, code and setup; the others, or all, from the checkpoint. `PackedSaver` writes the file
while the engine has nothing to do.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from quire.config import ModelConfig, RunnerConfig
from quire.errors import ModelLoadError
from quire.kernels.linear import PackedLinear
from quire.kernels.threads import QUIET_S, BetweenSteps, num_native_threads
from quire.metrics.log import Log
from quire.models import packed_file
from quire.models.fingerprint import code_digest, identity
from quire.models.loader import Cuts, iter_weights
from quire.models.packed_file import SUFFIX, Region, Unusable, packed_folder
from quire.quant.stored import Weight

log = Log("packed_cache")
_CODE = ("kernels", "layers", "models", "quant")  # packages that decide the bytes
_LOWEST = 19  # lowest priority (nice)


class CheckpointWeights:
    """The weights of ``model`` for one worker, as `iter_weights`; the decoder has those filled that are kept."""

    def __init__(
        self, model: ModelConfig, dtype: torch.dtype, runner: RunnerConfig, cuts: Cuts | None = None
    ) -> None:
        """``cuts``: what a rank reads; None: the whole model."""
        self._model, self._dtype, self._runner, self._cuts = model, dtype, runner, cuts
        self._filled: Collection[str] = ()
        self.saver: PackedSaver | None = None  # for weights that were packed instead of read
        self._key = ""
        config = model.packed_cache
        is_possible = runner.backend == "native" and model.load_format != "random"
        if config is not None and model.formats and is_possible:
            # The loader says what is wrong with the checkpoint.
            with contextlib.suppress(OSError, ModelLoadError):
                self._key = self._key_now()

    def _key_now(self) -> str:
        return packed_key(self._model, self._dtype, self._runner, self._cuts)

    def __iter__(self) -> Iterator[tuple[str, Weight]]:
        return iter_weights(self._model, self._dtype, cuts=self._cuts, without=self._filled)

    def fill(self, matrices: Mapping[str, Sequence[PackedLinear]]) -> Collection[str]:
        """Fill ``matrices``, all that are quantized, from the file that is kept. Return the weights that they have.

        If there is none, the matrices are as before, and `saver` keeps what they are packed with.
        """
        config = self._model.packed_cache
        tensors = _tensors(matrices)
        regions = regions_of(tensors)
        num_bytes = sum(region.num_bytes for region in regions)
        if not self._key or config is None or num_bytes < max(1, config.min_bytes):
            return ()
        try:
            folder = Path(config.folder) if config.folder else packed_folder()
        except OSError as error:
            log.warning("packed_weights_not_kept", error=error)
            return ()
        path = folder / (self._key + SUFFIX)
        began_s = time.monotonic()
        try:
            packed_file.read(path, self._key, regions, num_native_threads())
        except FileNotFoundError:
            log.debug("packed_weights_not_there", file=path)
        except (Unusable, OSError) as error:
            log.warning("packed_weights_not_used", file=path, error=error)
            for tensor in tensors:  # packing expects zeros
                tensor.zero_()
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            with contextlib.suppress(OSError):  # a folder that cannot be written to
                os.utime(path)
            log.info("packed_weights_read", mib=num_bytes >> 20, seconds=round(time.monotonic() - began_s, 2))
            self._filled = frozenset(matrices)
            return self._filled
        if num_bytes > config.max_bytes:
            log.info("packed_weights_not_kept", mib=num_bytes >> 20, packed_cache_mib=config.max_bytes >> 20)
        else:
            self.saver = PackedSaver(path, self._key, config.max_bytes, tensors, self._key_now)
        return ()


def packed_key(model: ModelConfig, dtype: torch.dtype, runner: RunnerConfig, cuts: Cuts | None) -> str:
    """Return a digest of all that the bytes of packed weights may depend on.

    Raises:
        OSError, ModelLoadError: the checkpoint cannot be read.
    """
    scope = (
        identity(Path(model.path)), code_digest(_CODE), torch.__version__, runner.backend, runner.isa, str(dtype),
        model.spec, sorted(model.formats.items()), None if cuts is None else sorted(cuts.items()),
    )  # fmt: skip
    return hashlib.blake2b(repr(scope).encode(), digest_size=16).hexdigest()


def _tensors(matrices: Mapping[str, Sequence[PackedLinear]]) -> list[torch.Tensor]:
    """Return the memory of ``matrices``, each once: q, k and v lie in one. Biases are weights of their own."""
    unique = {id(matrix): matrix for of_name in matrices.values() for matrix in of_name}
    parts = [part for matrix in unique.values() for part in (matrix.data, matrix.scale, matrix.offset)]
    tensors = [part for part in parts if part is not None]
    assert all(tensor.is_contiguous() for tensor in tensors)
    return tensors


class PackedSaver:
    """Writes packed weights to their file on a thread, a MiB at a time, while no step runs."""

    def __init__(
        self, path: Path, key: str, max_bytes: int, tensors: list[torch.Tensor], key_now: Callable[[], str]
    ) -> None:
        """``key_now``: the key by the files as they are then."""
        self._path, self._key, self._max_bytes, self._key_now = path, key, max_bytes, key_now
        self._tensors = tensors
        self.thread: threading.Thread | None = None

    def start(self, between: BetweenSteps) -> None:
        """Begin, once the weights are packed, and leave nothing behind if the engine ends before the file is whole."""
        self.thread = threading.Thread(target=self._run, args=(between,), name="packed weights", daemon=True)
        self.thread.start()

    def join(self) -> None:
        """Wait for the thread to end."""
        if self.thread is not None:
            self.thread.join()

    def _run(self, between: BetweenSteps) -> None:
        if sys.platform == "linux":  # elsewhere a thread has no priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)

        def may_write() -> bool:
            return between.wait(QUIET_S)

        try:
            if not may_write():
                return
            regions = regions_of(self._tensors)
            num_bytes, folder = sum(region.num_bytes for region in regions), self._path.parent
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < 2 * num_bytes:
                raise OSError(f"{num_bytes >> 20} MiB are wanted, and of {free >> 20} MiB half stay free")
            packed_file.make_room(folder, num_bytes, self._max_bytes)
            if packed_file.write(self._path, self._key, regions, may_write, self._is_right):
                log.info("packed_weights_kept", file=self._path, mib=num_bytes >> 20)
        except OSError as error:
            log.warning("packed_weights_not_kept", file=self._path, error=error)
        finally:
            self._tensors = []

    def _is_right(self) -> bool:
        """Whether the checkpoint is still what it was before it was read."""
        with contextlib.suppress(OSError, ModelLoadError):
            return self._key_now() == self._key
        return False


def regions_of(tensors: Sequence[torch.Tensor]) -> list[Region]:
    return [Region(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
