"""Planted faults in replicas that die, hang or load: retries, breakers, fallbacks."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
