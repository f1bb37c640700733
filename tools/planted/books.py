"""Planted faults in the books: ledger, journal, usage."""

from __future__ import annotations

from mutant import Mutant

BILLING = "tests/gateway/test_billing.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "refusal-billed",
        "what a backend refuses is booked as answered",
        "src/quire/gateway/proxy.py",
        "        if whole.status >= 400:\n",
        "        if whole.status >= 600:\n",
        (f"{BILLING}::test_what_a_backend_refuses_is_not_billed",),
    ),
    Mutant(
        "recovered-at-full-price",
        "a row that is made from a replica's record has no cached tokens",
        "src/quire/gateway/rows.py",
        "cached_tokens=used.cached_tokens,",
        "cached_tokens=0,",
        ("tests/gateway/test_booking.py::test_a_killed_gateways_requests_are_booked",),
    ),
    Mutant(
        "last-usage-is-the-end",
        "what a broken stream brought after its last usage is not counted",
        "src/quire/gateway/rows.py",
        "min(counted + exchange.usage.uncounted,",
        "min(counted or exchange.usage.uncounted,",
        (f"{BILLING}::test_events_behind_the_last_usage_are_counted",),
    ),
    Mutant(
        "broken-stream-free",
        "a stream that ends with an error is not billed",
        "src/quire/gateway/rows.py",
        'if exchange.outcome == "broken" and not output:',
        'if exchange.outcome == "broken":',
        (f"{BILLING}::test_an_error_in_a_stream_bills_what_the_client_had",),
    ),
    Mutant(
        "stream-error-blameless",
        "a backend whose streams end with errors keeps its good name",
        "src/quire/gateway/proxy.py",
        "is_good = self._broke(exchange, placed, exchange.usage.error)",
        "self._broke(exchange, placed, exchange.usage.error)",
        (f"{BILLING}::test_an_error_in_a_stream_bills_what_the_client_had",),
    ),
    Mutant(
        "text-counted-with-its-usage",
        "text that a usage covers is counted once more",
        "src/quire/gateway/usage.py",
        "            self.num_texts = self.num_text_bytes = 0\n",
        "",
        (f"{BILLING}::test_events_behind_the_last_usage_are_counted",),
    ),
)
