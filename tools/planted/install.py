"""Planted faults in what an install without extras starts."""

from __future__ import annotations

from mutant import Mutant

EXTRAS = "tests/test_extras.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "extra-at-the-top",
        "the gateway imports the extra `redis` although no setting names it",
        "src/quire_gateway/redis_store.py",
        "from quire.clock import RETRY_S, Clock\n",
        "import redis.asyncio\nfrom quire.clock import RETRY_S, Clock\n",
        (EXTRAS + "test_every_module_imports_without_any_extra",),
    ),
    Mutant(
        "books-opened-by-uvicorn",
        "books that cannot be opened are a traceback of uvicorn, and the gateway's exit status 3",
        "src/quire_gateway/server.py",
        "    state.start()",
        "    pass",
        (EXTRAS + "test_what_a_gateway_lacks_is_an_error_and_no_traceback",),
    ),
    Mutant(
        "half-an-extra",
        "an extra counts as installed when one of its packages is",
        "src/quire/extras.py",
        "if not all(map(_is_installed, extra.modules))",
        "if not any(map(_is_installed, extra.modules))",
        (EXTRAS + "test_an_extra_lacks_where_one_package_does",),
    ),
)
