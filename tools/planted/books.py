"""Planted faults in the books: ledger, journal, usage."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
