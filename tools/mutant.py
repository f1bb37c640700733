"""`Mutant`: one planted fault. A fault is small, plausible, and wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace ``old`` by ``new`` in ``file``; one of ``tests`` (pytest arguments) must then fail."""

    name: str
    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    count: int = 1  # how often ``old`` occurs
    hangs: bool = False  # the tests catch it by waiting in vain

    @property
    def is_native(self) -> bool:
        """Whether the fault is compiled."""
        return self.file.startswith("csrc/")

    @property
    def is_on_tiles(self) -> bool:
        """Whether the fault is in a source of the amx level alone."""
        return self.is_native and "_amx." in self.file
