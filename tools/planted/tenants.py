"""Planted faults in who may read: tenants of every id and of the prefix cache."""

from __future__ import annotations

from mutant import Mutant

_JOURNAL = ("tests/api/test_api_journal.py",)
_HOLDERS = "tests/gateway/test_holders.py"
_IDS = ("tests/gateway/test_ownership.py",)
_SALTS = ("tests/gateway/test_ownership.py", "-k", "salt or routing or group")
_TABLE = ("tests/gateway/test_isolation.py::test_no_tenant_goes_on_with_what_another_has[serve]",)
_BATCH = ("tests/gateway/test_isolation.py::test_a_batch_has_the_rights_of_its_key_and_no_more",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "tenants-resume-after-effect",
        "another tenant's resume is refused once the stream that runs has ended",
        "src/quire/api/journal.py",
        """        if await self._tenant(stream_id) != tenant:
            raise _not_found(stream_id)
        before = self._entries.get(stream_id)
        if before is not None and before.end_request is not None:
            await before.end_request()
            await before.released.wait()
""",
        """        before = self._entries.get(stream_id)
        if before is not None and before.end_request is not None:
            await before.end_request()
            await before.released.wait()
        if await self._tenant(stream_id) != tenant:
            raise _not_found(stream_id)
""",
        _JOURNAL,
    ),
    Mutant(
        "tenants-resume-by-anyone",
        "a stream of an earlier server belongs to clients without a tenant",
        "src/quire/api/journal.py",
        "        return tenants[0] if tenants else None\n",
        '        return "" if tenants else None\n',
        _JOURNAL,
    ),
    Mutant(
        "tenants-journal-drops-running",
        "the journal deletes streams that run to make room for new ones",
        "src/quire/api/journal.py",
        """            if entry.ended_s is not None:
                self.discard(entry)
        return""",
        """            if entry.num_bytes:
                self.discard(entry)
        return""",
        _JOURNAL,
    ),
    Mutant(
        "tenants-tag-not-compared",
        "the gateway takes an id with any tag",
        "src/quire_gateway/ownership.py",
        "hmac.compare_digest(tag.encode(), self._tag(own_id, hint).encode())",
        "len(tag) == len(self._tag(own_id, hint))",
        _IDS,
    ),
    Mutant(
        "tenants-tag-without-tenant",
        "the tag of an id is the same for all tenants",
        "src/quire_gateway/ownership.py",
        r'f"{self.tenant}\0{own_id}"',
        'f"{own_id}"',
        _IDS,
    ),
    Mutant(
        "tenants-tag-by-process",
        "each gateway has a key of its own for the tags, so none takes an id of another or from before a restart",
        "src/quire_gateway/ownership.py",
        '_derived(table.secret, b"quire.ids.v1")',
        '_derived(str(id(table)).encode(), b"quire.ids.v1")',
        _IDS,
    ),
    Mutant(
        "tenants-untagged-id-taken",
        "with several tenants the gateway takes an id without a tag as it is",
        "src/quire_gateway/ownership.py",
        "return None if self.seals else shown_id",
        'return None if self.seals and "-" in shown_id else shown_id',
        _IDS,
    ),
    Mutant(
        "tenants-hint-unsigned",
        "the hint of a backend in an id can be changed",
        "src/quire_gateway/ownership.py",
        'of_hint = text + b"\\0" + hint.encode("utf-8", "surrogatepass")',
        "of_hint = text",
        (f"{_HOLDERS}::test_a_hint_tells_no_name_and_cannot_be_changed",),
    ),
    Mutant(
        "hint-not-followed",
        "after a restart a gateway asks all backends where a response is, and knows none that only a hint names",
        "src/quire_gateway/holders.py",
        "if hint and owner.hint_of(b.name) == hint",
        "if False",
        (f"{_HOLDERS}::test_a_backend_that_shows_nothing_is_found_by_the_hint",),
    ),
    Mutant(
        "holder-is-a-preference",
        "a request whose response is at a backend that is down is sent to one that says it is lost",
        "src/quire_gateway/fleet.py",
        "            and only in (None, b.name)\n",
        "",
        (f"{_HOLDERS}::test_a_response_at_a_silent_backend_is_not_said_to_be_lost",),
    ),
    Mutant(
        "tenants-continue-unchecked",
        "the gateway lets a response of another tenant be continued",
        "src/quire_gateway/sealed.py",
        "        own_id = owner.open(previous)\n",
        '        own_id = owner.open(previous) or previous.rpartition("-")[0]\n',
        _IDS,
    ),
    Mutant(
        "tenants-reference-unchecked",
        "the gateway passes references to items of another tenant on",
        "src/quire_gateway/sealed.py",
        "        if own_id is None and _refers(item):\n",
        "        if False:\n",
        _IDS,
    ),
    Mutant(
        "filters-leave-ids",
        "ids of tokens without a text of their own pass the filters that removed what they are of",
        "src/quire_gateway/filtering.py",
        "(_is_empty(piece) and text.is_changed_at(start))",
        "False",
        ("tests/gateway/test_native_streams.py::test_ids_without_text_go_with_the_text_around_them",),
    ),
    Mutant(
        "filters-release-ids-early",
        "an id without a text leaves before the text that follows it is filtered",
        "src/quire_gateway/filtering.py",
        "(self.has_ended or not is_empty)",
        "True",
        ("tests/gateway/test_native_streams.py::test_ids_without_text_go_with_the_text_around_them",),
    ),
    Mutant(
        "tenants-salt-without-tenant",
        "the salt of a request does not depend on its tenant",
        "src/quire_gateway/salts.py",
        "{call.salt_group}",
        "",
        _SALTS,
    ),
    Mutant(
        "tenants-group-ignored",
        "the gateway gives the tenants of one cache group different salts",
        "src/quire_gateway/salts.py",
        "{call.salt_group}",
        "{call.tenant}",
        _SALTS,
    ),
    Mutant(
        "tenants-salt-of-client-wins",
        "a client's cache_salt goes to the backend in place of its tenant's",
        "src/quire_gateway/client_request.py",
        "        if salt is not None:\n",
        '        if salt is not None and not self.body.get("cache_salt"):\n',
        _SALTS,
    ),
    Mutant(
        "tenants-index-unsalted",
        "the gateway's index of prefixes is one for all tenants",
        "src/quire_gateway/placing.py",
        "root_of(model, salt if request.salt is None else request.salt)",
        "root_of(model, salt)",
        _SALTS,
    ),
    Mutant(
        "tenants-server-salt-chosen",
        "a client without a tenant can choose the salt of one",
        "src/quire/http/call.py",
        r'if group or "\n" in salt else salt',
        "if group else salt",
        ("tests/api/test_api_tenants.py",),
    ),
    Mutant(
        "tenants-running-response-read",
        "a key without a tenant reads all background responses that run",
        "src/quire/api/dialects/responses/stored.py",
        "if request.job.owner == call.tenant else None",
        "if request.job.owner == call.tenant or not call.tenant else None",
        ("tests/api/test_api_tenants.py",),
    ),
    Mutant(
        "tenants-item-of-another",
        "a reference to an item finds those of all tenants",
        "src/quire/api/dialects/responses/store.py",
        "if owner == tenant and item_id.encode() in stored.response:",
        "if item_id.encode() in stored.response:",
        _TABLE,
    ),
    Mutant(
        "tenants-file-of-another",
        "a file is found by its id alone",
        "src/quire/jobs/files.py",
        """if value.pop("tenant", "") != tenant:""",
        """if value.pop("tenant", "") is None:""",
        ("tests/api/test_api_tenants.py",),
    ),
    Mutant(
        "tenants-batch-without-tenant",
        "the requests of a batch run without its tenant after a restart",
        "src/quire/jobs/runner.py",
        "replace(call_for(batch), request_id",
        "replace(Call(is_local=True), request_id",
        ("tests/gateway/test_isolation.py::test_a_batch_after_a_restart_is_still_its_tenants",),
    ),
    Mutant(
        "tenants-batch-without-key",
        "the requests of a batch may use models that its key may not",
        "src/quire/jobs/runner.py",
        'replace(call, key=key, weight=rights["weight"])',
        'replace(call, weight=rights["weight"])',
        _BATCH,
    ),
    Mutant(
        "tenants-misses-of-all-callers",
        "a prompt is compared with those of other tenants, token by token",
        "src/quire/api/cache_miss.py",
        "            if owner == caller and (",
        "            if (",
        ("tests/api/test_api_cache_miss.py", "-k", "another_caller"),
    ),
)
