"""Planted faults in who may read: tenants of every id and of the prefix cache."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
