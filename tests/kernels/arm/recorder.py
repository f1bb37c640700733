"""Cases for the Arm program: calls of the native functions, executed here at the scalar level, and what they leave.

A case goes to two files, which main.cpp reads: lines of words (buffers, calls, checks), and the bytes of the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quire import _native

THREADS, LEVEL = "threads", "level"  # arguments of a call that the program chooses


@dataclass(frozen=True, slots=True)
class Place:
    """An address: ``offset`` bytes from the start of ``tensor``, which the case knows as ``name``."""

    name: str
    tensor: Tensor
    offset: int = 0

    def at(self, elements: int) -> Place:
        return Place(self.name, self.tensor, self.offset + elements * self.tensor.element_size())

    @property
    def address(self) -> int:
        return self.tensor.data_ptr() + self.offset


Argument = Place | str | int | float | None | tuple["Argument", ...]


def _word(value: Argument) -> str:
    match value:
        case Place():
            return f"@{value.name}+{value.offset}"
        case str():
            return value if value in (THREADS, LEVEL) else f"s{value}"
        case float():
            return f"f{value!r}"
        case int():  # bool too
            return f"i{int(value)}"
        case None:
            return "none"
        case tuple():
            return " ".join(("(", *map(_word, value), ")"))


def _here(value: Argument, level: str) -> object:
    match value:
        case Place():
            return value.address
        case str():
            return {THREADS: 1, LEVEL: level}.get(value, value)
        case tuple():
            return tuple(_here(each, level) for each in value)
    return value


@dataclass(slots=True)
class Case:
    """One case. Buffers come first, then calls, then checks, which execute the calls here."""

    title: str
    lines: list[str] = field(default_factory=list)
    values: bytearray = field(default_factory=bytearray)
    places: dict[bytes, int] = field(default_factory=dict)  # of what lies in `values`
    tensors: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # and as they are before the calls
    calls: list[tuple[str, tuple[Argument, ...]]] = field(default_factory=list)
    level: str = ""  # of the x86 kernels that the buffers hold the results of

    def buffer(self, tensor: Tensor) -> Place:
        """An input or output; ``tensor`` holds its initial values."""
        assert tensor.is_contiguous()
        name = f"b{len(self.tensors)}"
        place = -1 if not tensor.view(torch.uint8).any() else self._put(tensor)
        self.lines.append(f"buffer {name} {tensor.nbytes} {place}")
        self.tensors.append((tensor, tensor.clone()))
        return Place(name, tensor)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Place:
        return self.buffer(torch.zeros(shape, dtype=dtype))

    def pointers(self, *targets: Place | None) -> Place:
        """A table of addresses; None is 0."""
        table = torch.tensor([target.address if target else 0 for target in targets])
        place = self.zeros(len(targets), dtype=torch.int64)
        place.tensor.copy_(table)
        self.tensors[-1] = (place.tensor, table)
        for index, target in enumerate(targets):
            if target is not None:
                self.lines.append(f"pointer {place.name} {8 * index} {target.name} {target.offset}")
        return place

    def call(self, name: str, *arguments: Argument) -> None:
        self.lines.append(" ".join(("call", name, *map(_word, arguments))))
        self.calls.append((name, arguments))
        self.level = ""

    def execute(self, level: str = "scalar") -> None:
        """Execute the calls here, unless the buffers hold their results."""
        if level == self.level:
            return
        for tensor, before in self.tensors:
            tensor.copy_(before)
        for name, arguments in self.calls:
            getattr(_native, name)(*(_here(each, level) for each in arguments))
        self.level = level

    def bits(self, place: Place, arm: str = "all", x86: str = "scalar") -> None:
        """The Arm level (or all) has the bits of an x86 level."""
        self.execute(x86)
        self.lines.append(f"bits {place.name} {place.tensor.nbytes} {self._put(place.tensor)} {arm}")

    def close(self, place: Place, absolute: float, relative: float = 0.0) -> None:
        """Every level is close to the scalar level, whose bits the scalar level on Arm has."""
        self.bits(place, arm="scalar")
        tensor = place.tensor
        kind = str(tensor.dtype).removeprefix("torch.")
        assert kind in ("bfloat16", "float32", "int8")
        at = self._put(tensor)
        self.lines.append(f"close {place.name} {tensor.numel()} {at} {kind} {absolute} {relative}")

    def same(self, one: Place, other: Place) -> None:
        """Two buffers hold the same bits, at every level."""
        self.execute()
        assert torch.equal(one.tensor.view(torch.uint8), other.tensor.view(torch.uint8)), self.title
        self.lines.append(f"same {one.name} {other.name}")

    def _put(self, tensor: Tensor) -> int:
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        if data not in self.places:
            self.places[data] = len(self.values)
            self.values += data
        return self.places[data]


def write(cases: list[Case], folder: Path) -> None:
    """Write ``cases.txt`` and ``cases.bin``."""
    lines, values = [], bytearray()
    for case in cases:
        lines.append(f"case {case.title}")
        for line in case.lines:
            words = line.split(" ")
            if words[0] in ("buffer", "bits", "close") and words[3] != "-1":
                words[3] = str(int(words[3]) + len(values))
            lines.append(" ".join(words))
        values += case.values
    (folder / "cases.txt").write_text("\n".join(lines) + "\n")
    (folder / "cases.bin").write_bytes(values)
