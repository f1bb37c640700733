"""`Segment`: the shared memory of the ranks of one machine: its layout, creation, mapping and removal.

    | header: magic, sizes, abort word | lanes: two flags per axis and rank | slots: two per axis and rank |

An axis with one rank has no lanes and no slots. The process that starts the ranks creates the segment and removes its
name in every case; the memory itself goes when the last process that maps it ends. Any process may set the abort word:
every rank that waits in a collective then fails within 20 ms (csrc/cpu/collective.h). Torch-free.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError, StepError
from quire.modelspec import ModelSpec
from quire.parallel.shard import shard
from quire.parallel.topology import AXES, Axis, Topology
from quire.units import PIECE_BYTES

SLOT_BYTES = PIECE_BYTES  # longer messages go in pieces
_MAGIC = b"QUIRESHM"
_VERSION = 1
_HEADER = struct.Struct("<8s6Iq")  # magic, version, tp, pp, ep, cp, -, bytes of a slot
_ABORT_AT = 64
_LANES_AT = 4096
_LANE_BYTES = 128  # `Lane` in C++
_FOLDER = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where the members of a group meet: offsets in the segment, in the order of ``ranks``."""

    ranks: tuple[int, ...]
    lanes: tuple[int, ...]
    slots: tuple[int, ...]  # two of ``slot_bytes`` each
    slot_bytes: int
    abort_word: int

    @classmethod
    def of_rank(cls, topology: Topology, rank: int, axis: Axis, slot_bytes: int = SLOT_BYTES) -> Lanes:
        """Return where ``rank`` meets its group of ``axis``."""
        used = [axis_name for axis_name in AXES if getattr(topology, axis_name) > 1]
        ranks, first = topology.group(rank, axis), used.index(axis) * topology.world_size
        lanes = tuple(_LANES_AT + (first + rank) * _LANE_BYTES for rank in ranks)
        slots = tuple(_slots_at(topology) + (first + rank) * 2 * slot_bytes for rank in ranks)
        return cls(ranks, lanes, slots, slot_bytes, _ABORT_AT)


def segment_bytes(topology: Topology, slot_bytes: int = SLOT_BYTES) -> int:
    """Return the bytes of the segment; whatever the step."""
    axes: int = sum(getattr(topology, axis) > 1 for axis in AXES)
    num_slots = 2 * axes * topology.world_size
    return _slots_at(topology) + num_slots * slot_bytes


def slot_bytes_of(spec: ModelSpec, topology: Topology) -> int:
    """Return the size of a slot in which every row of the model that ranks exchange has room: whole MiB."""
    longest = 0
    for rank in range(topology.world_size):
        part, cp = shard(spec, topology, rank), topology.cp
        sizes = [spec.hidden_size, part.max_vocab if topology.tp * topology.ep > 1 else 0]
        # A row's partial results for all ranks (MLA: of the latent size), or its q, k and v together.
        if cp > 1:
            for a in part.spec.attentions:
                size = a.kv_lora_rank if a.is_mla else a.v_head_dim
                sizes += [cp * a.num_heads * (size + 2), (a.num_heads + 2 * a.num_kv_heads) * a.head_dim]
        longest = max(longest, 4 * max(sizes))  # fp32
    return max(1, -(-longest // SLOT_BYTES)) * SLOT_BYTES


def _slots_at(topology: Topology) -> int:
    lanes = len(AXES) * topology.world_size * _LANE_BYTES
    return _LANES_AT + -(-lanes // 4096) * 4096


class Segment:
    """A mapping of the segment ``name``; use `create` or `attach`."""

    def __init__(self, name: str, memory: mmap.mmap, topology: Topology, slot_bytes: int) -> None:
        self.name = name
        self.topology = topology
        self.slot_bytes = slot_bytes
        self._memory = memory
        self._abort = ctypes.c_uint32.from_buffer(memory, _ABORT_AT)

    @classmethod
    def create(cls, name: str, topology: Topology, slot_bytes: int = SLOT_BYTES) -> Segment:
        """Create it, all zeros, readable by this user alone.

        Raises:
            ConfigError: /dev/shm has too little room, or has the name already.
        """
        size = segment_bytes(topology, slot_bytes)
        try:
            handle = os.open(_FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise ConfigError(f"the shared memory {_FOLDER / name} cannot be created: {error}") from None
        try:
            os.posix_fallocate(handle, 0, size)  # or a later write would end the process with SIGBUS
            memory = mmap.mmap(handle, size)
        except OSError as error:
            remove(name)
            raise ConfigError(
                f"{_FOLDER} has too little room: {topology} needs {size >> 20} MiB of shared memory ({error}). Free "
                "some, or mount it larger (docker run --shm-size)."
            ) from None
        finally:
            os.close(handle)
        _HEADER.pack_into(
            memory, 0, _MAGIC, _VERSION, topology.tp, topology.pp, topology.ep, topology.cp, 0, slot_bytes
        )
        return cls(name, memory, topology, slot_bytes)

    @classmethod
    def attach(cls, name: str, topology: Topology) -> Segment:
        """Map a segment that another process created. Raises `StepError` where it is gone or of another topology."""
        try:
            handle = os.open(_FOLDER / name, os.O_RDWR)
        except OSError as error:
            raise StepError(f"the shared memory {_FOLDER / name} cannot be opened: {error}") from None
        try:
            memory = mmap.mmap(handle, 0)
        finally:
            os.close(handle)
        *header, slot_bytes = _HEADER.unpack_from(memory, 0)
        expected = [_MAGIC, _VERSION, topology.tp, topology.pp, topology.ep, topology.cp, 0]
        if header != expected:
            raise StepError(
                f"the shared memory {_FOLDER / name} is of another group: {header}, not {expected}"
            )
        return cls(name, memory, topology, slot_bytes)

    @property
    def address(self) -> int:
        """Where this process's mapping starts."""
        return ctypes.addressof(self._abort) - _ABORT_AT

    @property
    def aborted(self) -> bool:
        return bool(self._abort.value)

    def abort(self) -> None:
        """Let every rank that waits, now or later, fail at once."""
        self._abort.value = 1


def remove(name: str) -> None:
    """Remove the name of a segment; processes that map it keep the memory until they end. Twice is no error."""
    if name:
        (_FOLDER / name).unlink(missing_ok=True)
