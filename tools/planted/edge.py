"""Planted faults in the HTTP edge: origins, hosts, ids, files that others could read."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "ids-from-a-generator",
        "ids come from a generator whose state 156 of them tell",
        "src/quire/http/edge.py",
        "    return os.urandom(16).hex()\n",
        '    return f"{_RANDOM.getrandbits(128):032x}"\n\n\n_RANDOM = __import__("random").Random(os.urandom(16))\n',
        ("tests/http/test_ids.py",),
    ),
)
