"""Planted faults in the gateway's admission: limits, bounds, bursts."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = ()
