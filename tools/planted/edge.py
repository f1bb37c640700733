"""Planted faults in the HTTP edge: origins, hosts, ids, files that others could read."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
