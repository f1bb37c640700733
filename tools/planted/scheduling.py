"""Planted faults in who waits in the scheduler: order, round robin, fair shares."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
