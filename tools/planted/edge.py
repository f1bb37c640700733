"""Planted faults in the HTTP edge: origins, hosts, ids, files that others could read."""

from __future__ import annotations

from mutant import Mutant

HTTP1 = "tests/http/test_http1_edge.py"
PIPELINED = "tests/http/test_pipelined.py"
GUARD = "tests/http/test_browser_guard.py"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "ids-from-a-generator",
        "ids come from a generator whose state 156 of them tell",
        "src/quire/http/edge.py",
        "    return os.urandom(16).hex()\n",
        '    return f"{_RANDOM.getrandbits(128):032x}"\n\n\n_RANDOM = __import__("random").Random(os.urandom(16))\n',
        ("tests/http/test_ids.py",),
    ),
    Mutant(
        "origin-not-checked-on-get",
        "a foreign page may send GET",
        "src/quire/http/browser_guard.py",
        "        if origin is None:\n",
        '        if origin is None or scope.get("method") == "GET":\n',
        (f"{GUARD}::test_foreign_pages_are_refused_in_every_form[server]",),
    ),
    Mutant(
        "host-by-its-end",
        "a name that ends like an allowed one passes",
        "src/quire/http/browser_guard.py",
        'name.endswith(allowed[1:]) if allowed.startswith("*.") else name == allowed',
        'name.endswith(allowed.removeprefix("*."))',
        (f"{GUARD}::test_allowed_hosts_are_whole_names",),
    ),
    Mutant(
        "null-is-a-local-origin",
        "a page in a sandbox counts as one of this machine",
        "src/quire/http/browser_guard.py",
        'r"|(app|file|tauri|vscode-file|vscode-webview)://[^/\\s]*"',
        'r"|null|(app|file|tauri|vscode-file|vscode-webview)://[^/\\s]*"',
        (f"{GUARD}::test_foreign_pages_are_refused_in_every_form[gateway]",),
    ),
    Mutant(
        "admin-takes-every-host",
        "the admin surface answers under any name, and a rebound page reads it",
        "src/quire/http/browser_guard.py",
        "            refusal = host_problem(scope, self._rules)\n",
        "            refusal = None\n",
        (f"{GUARD}::test_on_loopback_a_foreign_host_is_refused[admin]",),
    ),
    Mutant(
        "answers-for-every-reader",
        "files of batches and responses have the mode that the umask leaves",
        "src/quire/private.py",
        "return os.open(path, flags | os.O_CLOEXEC, 0o600)",
        "return os.open(path, flags | os.O_CLOEXEC, 0o666)",
        ("tests/test_private.py",),
    ),
    Mutant(
        "old-ledger-stays-open",
        "the ledger of an older version stays readable for everybody",
        "src/quire_gateway/ledger_database.py",
        '        for end in ("", "-wal", "-shm"):\n            tighten(path.with_name(path.name + end))\n',
        "",
        ("tests/test_private.py::test_a_gateways_books_are_its_users_alone",),
    ),
    Mutant(
        "hang-dumps-for-good",
        "what hung engines said is never removed",
        "src/quire/engine/recording_file.py",
        "        old.unlink(missing_ok=True)\n",
        "        pass\n",
        ("tests/test_private.py::test_recordings_and_hang_dumps_are_few_and_private",),
    ),
    Mutant(
        "tenants-in-open-metrics",
        "/metrics names tenants without a key",
        "src/quire_gateway/app.py",
        "with_tenants = server.metrics_tenants or holds_key(request.scope, server.admin_key)",
        "with_tenants = True",
        ("tests/gateway/test_metrics_of_tenants.py::test_metrics_name_tenants_to_the_admin_key_alone",),
    ),
    Mutant(
        "no-admin-key-is-any-key",
        "where no admin key is set, every request holds it",
        "src/quire/http/rights.py",
        "    return key is not None and any(",
        "    return key is None or any(",
        ("tests/gateway/test_metrics_of_tenants.py::test_metrics_name_tenants_to_the_admin_key_alone",),
    ),
    Mutant(
        "bombs-in-coded-bodies",
        "the limit of a body holds before it is decoded, and not after",
        "src/quire/http/long_body.py",
        "            if decoded_size > max_bytes:\n",
        "            if False:\n",
        (f"{HTTP1}::test_codings_are_bounded_known_and_whole[server]",),
    ),
    Mutant(
        "head-in-one-read",
        "a head that comes in one read may have any length",
        "src/quire/http/connections.py",
        "MAX_HEAD_BYTES and self._is_long_head(data):\n",
        "MAX_HEAD_BYTES and False:\n",
        (f"{HTTP1}::test_heads_beyond_64_kib_are_refused[server]",),
    ),
    Mutant(
        "unread-body-is-the-next-request",
        "a connection stays open behind a refusal whose promised body was never sent",
        "src/quire/http/connections.py",
        "if is_last and self.expect_100_continue and",
        "if False and",
        (f"{PIPELINED}::test_a_refusal_without_the_promised_body_closes",),
    ),
    Mutant(
        "close-before-the-next-answer",
        "an answer closes the connection of a second request that has promised its body",
        "src/quire/http/connections.py",
        "if is_last and self",
        "if self",
        (f"{PIPELINED}::test_an_answer_does_not_close_before_the_next_one",),
    ),
    Mutant(
        "second-head-in-one-read",
        "a second head that comes whole with the first one may have any length",
        "src/quire/http/connections.py",
        "        if num_bytes > MAX_HEAD_BYTES:\n",
        "        if False:\n",
        (f"{PIPELINED}::test_a_second_head_of_the_same_read_has_the_limit",),
    ),
)
