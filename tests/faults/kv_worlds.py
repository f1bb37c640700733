"""What the campaigns of `tests.faults.kv_tier` find blocks in: folders, or peers, that outlive the engines."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from tests.fakes.faulty_peers import PEER_FAULTS, FaultyPeers, Giver, PeerFault
from tests.fakes.faulty_store import FAULTS, Fault, FaultyStore

ROOT_NAME = "0" * 32
# What loses all blocks, or silences a store for long, is rare: else there is little left to read.
RARE = ("removed", "killed", "dead", "restarted", "leases-end", "lies-less")


class FaultyTier(Protocol):
    """The store of one engine, as a `quire.tiers.store.BlockStore`."""

    @property
    def seen(self) -> Counter[Any]: ...
    def close(self) -> None: ...


class World(Protocol):
    """What outlives the engines of a campaign."""

    title: str
    kinds: tuple[str, ...]
    where: str

    def open(self, index: int, seed: int, wait: Callable[[float], object]) -> FaultyTier:
        """Return the store for an engine of the model ``index``."""
        ...

    def forget(self, index: int) -> None:
        """Lose what there is of a model."""
        ...

    def close(self) -> None: ...


class DiskWorld:
    """Folders with segments, one per model."""

    title, kinds, where = "The tier on disk", FAULTS, "tests/fakes/faulty_store.py"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="quire-faults-kv-")

    def open(self, index: int, seed: int, wait: Callable[[float], object]) -> FaultyTier:
        rates = cast("Mapping[Fault, float]", rates_of(FAULTS, 0.09))
        return FaultyStore(
            self._path(index), 4 << 20, ROOT_NAME, rates=rates, seed=seed, wait=wait, hang_s=0.8
        )

    def forget(self, index: int) -> None:
        shutil.rmtree(self._path(index))

    def close(self) -> None:
        self._folder.cleanup()

    def _path(self, index: int) -> Path:
        return Path(self._folder.name) / str(index)


class PeerWorld:
    """Two peers per model. ``hangs``: whether some say nothing more, for which an engine waits ``timeout_s``."""

    title, kinds, where = "Blocks of peers", PEER_FAULTS, "tests/fakes/faulty_peers.py"

    def __init__(self, *, hangs: bool = True, timeout_s: float = 0.3) -> None:
        self._hangs, self._timeout_s = hangs, timeout_s
        self._givers: dict[int, tuple[Giver, Giver]] = {}

    def open(self, index: int, seed: int, wait: Callable[[float], object]) -> FaultyTier:
        if index not in self._givers:
            self._givers[index] = Giver(4 << 20, ROOT_NAME, seed), Giver(4 << 20, ROOT_NAME, seed + 1)
        rates = cast("dict[PeerFault, float]", rates_of(PEER_FAULTS, 0.12))
        if not self._hangs:
            rates["hang"] = 0.0
        return FaultyPeers(
            self._givers[index],
            1 << 18,
            ROOT_NAME,
            rates=rates,
            seed=seed,
            wait=wait,
            timeout_s=self._timeout_s,
        )

    def forget(self, index: int) -> None:
        for giver in self._givers.pop(index, ()):
            giver.close()

    def close(self) -> None:
        for index in list(self._givers):
            self.forget(index)


def rates_of(kinds: tuple[str, ...], rate: float) -> dict[str, float]:
    return {kind: rate / 3 if kind in RARE else rate for kind in kinds}
