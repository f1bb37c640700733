"""Planted faults in the books: ledger, journal, usage."""

from __future__ import annotations

from mutant import Mutant

BILLING = "tests/gateway/test_billing.py"
DISK = "tests/gateway/test_full_disk.py"
BOOKING = "tests/gateway/test_booking.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "refusal-billed",
        "what a backend refuses is booked as answered",
        "src/quire_gateway/proxy.py",
        "        if reply.status >= 400:\n",
        "        if reply.status >= 600:\n",
        (f"{BILLING}::test_what_a_backend_refuses_is_not_billed",),
    ),
    Mutant(
        "recovered-at-full-price",
        "a row that is made from a replica's record has no cached tokens",
        "src/quire_gateway/ledger_row.py",
        "cached_tokens=used.cached_tokens,",
        "cached_tokens=0,",
        ("tests/gateway/test_booking.py::test_a_killed_gateways_requests_are_booked",),
    ),
    Mutant(
        "last-usage-is-the-end",
        "what a broken stream brought after its last usage is not counted",
        "src/quire_gateway/used.py",
        "min(counted + exchange.usage.uncounted,",
        "min(counted or exchange.usage.uncounted,",
        (f"{BILLING}::test_events_behind_the_last_usage_are_counted",),
    ),
    Mutant(
        "broken-stream-free",
        "a stream that ends with an error is not billed",
        "src/quire_gateway/used.py",
        'if exchange.outcome == "broken" and not output:',
        'if exchange.outcome == "broken":',
        (f"{BILLING}::test_an_error_in_a_stream_bills_what_the_client_had",),
    ),
    Mutant(
        "stream-error-blameless",
        "a backend whose streams end with errors keeps its good name",
        "src/quire_gateway/proxy.py",
        "is_good = self._broke(exchange, placed, exchange.usage.error)",
        "self._broke(exchange, placed, exchange.usage.error)",
        (f"{BILLING}::test_an_error_in_a_stream_bills_what_the_client_had",),
    ),
    Mutant(
        "text-counted-with-its-usage",
        "text that a usage covers is counted once more",
        "src/quire_gateway/usage.py",
        "            self.num_texts = self.num_text_bytes = 0\n",
        "",
        (f"{BILLING}::test_events_behind_the_last_usage_are_counted",),
    ),
    Mutant(
        "slot-free-before-a-disk-has-the-row",
        "a row that neither the database nor the spool took leaves memory and journal",
        "src/quire_gateway/ledger.py",
        "for _ in batch if is_stored else ():",
        "for _ in batch:",
        (f"{DISK}::test_a_row_keeps_its_slot_until_a_disk_has_it",),
    ),
    Mutant(
        "served-unbooked",
        "a full journal lets requests through that are in no book",
        "src/quire_gateway/books.py",
        "            raise self._full()\n        return taken",
        "            pass\n        return taken",
        (f"{DISK}::test_what_cannot_be_booked_is_not_served", f"{DISK}::test_begun_needs_a_slot"),
    ),
    Mutant(
        "no-spare-slot",
        "the last free slot goes to a new request, and rows that replace others have none",
        "src/quire_gateway/journal.py",
        "len(self.free_slots) > 1 or",
        "len(self.free_slots) > 0 or",
        (f"{DISK}::test_a_journal_is_allocated_and_grows_by_what_there_is",),
    ),
    Mutant(
        "journal-not-allocated",
        "the journal's file is made of holes, and a full disk kills the process that writes into them",
        "src/quire_gateway/journal.py",
        "            os.posix_fallocate(self._file, 0, size)\n",
        "            os.ftruncate(self._file, size)\n",
        (f"{DISK}::test_a_first_start_on_a_full_disk_is_one_line",),
    ),
    Mutant(
        "foreign-record-booked",
        "a gateway books the requests of another ledger",
        "src/quire_gateway/booking.py",
        "if run is None and used.ledger != self._books.ledger_id:",
        "if run is None and used.ledger is None:",
        (f"{BOOKING}::test_a_killed_gateways_requests_are_booked",),
    ),
    Mutant(
        "foreign-records-told",
        "a replica tells a gateway of other ledgers' requests",
        "src/quire/api/finished.py",
        "if ledgers is None or used.ledger in ledgers",
        "if ledgers is None or used.ledger is not None",
        (f"{BOOKING}::test_a_record_names_its_ledger",),
    ),
    Mutant(
        "recovered-twice",
        "a request that a replica has a record of is booked once more as unsettled",
        "src/quire_gateway/booking.py",
        "run = self._running.pop(used.request_id, None)",
        "run = self._running.get(used.request_id)",
        (f"{BOOKING}::test_a_killed_gateways_requests_are_booked",),
    ),
    Mutant(
        "goodput-of-broken-answers",
        "an answer that broke off in time counts as goodput",
        "src/quire_gateway/used.py",
        'if exchange.outcome != "ok" or exchange.backend is None:',
        "if exchange.backend is None:",
        ("tests/gateway/test_costs.py::test_an_answer_meets_every_latency_or_not",),
    ),
    Mutant(
        "cost-told-to-clients",
        "every client gets the costs that are for gateways",
        "src/quire_gateway/headers.py",
        "        COST_HEADER.encode(),\n",
        "",
        ("tests/gateway/test_costs.py::test_a_whole_answers_cost_is_in_its_row",),
    ),
)
