"""The file of API keys: created, rotated, revoked; read while it changes; never a key in clear."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.http.keys import PREFIX, RELOAD_S, ApiKey, KeyFile, create_key, read_keys, revoke_key, rotate_key

NOW = datetime(2026, 11, 22, tzinfo=UTC)


def key(name: str, **values: object) -> ApiKey:
    return ApiKey(name=name, tenant="lab", digest="", created=NOW, **values)  # type: ignore[arg-type]


def test_a_created_key_is_found_with_its_rights(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "keys"
    text = create_key(
        path,
        key(
            "alice", models=("llama-*",), endpoints=("/v1/chat/*",), expires=datetime(2027, 1, 1, tzinfo=UTC)
        ),
    )
    create_key(path, key("bob", admin=True))
    assert text.startswith(PREFIX)
    found = read_keys(path).find(text.encode())
    assert found is not None
    assert (found.name, found.tenant, found.admin) == ("alice", "lab", False)
    assert found.allows_model("llama-1b")
    assert not found.allows_model("quill")
    assert found.allows_endpoint("/v1/chat/completions")
    assert not found.allows_endpoint("/v1/embeddings")
    assert not found.is_expired(NOW)
    assert found.is_expired(datetime(2027, 1, 1, tzinfo=UTC))


def test_the_file_holds_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    texts = [create_key(path, key(name)) for name in ("a", "b", "c")]
    content = path.read_text()
    assert not any(text.removeprefix(PREFIX) in content for text in texts)
    assert path.stat().st_mode & 0o777 == 0o600


def test_wrong_keys_are_not_found(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    text = create_key(path, key("alice"))
    table = read_keys(path)
    for wrong in ("", text[:-1], text + "x", PREFIX, "x" * 10_000_000, text.upper()):
        assert table.find(wrong.encode()) is None


def test_rotation_and_revocation_end_the_old_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    old = create_key(path, key("alice", models=("m",)))
    new = rotate_key(path, "alice")
    table = read_keys(path)
    assert table.find(old.encode()) is None
    found = table.find(new.encode())
    assert found is not None
    assert found.models == ("m",)
    revoke_key(path, "alice")
    assert read_keys(path).find(new.encode()) is None
    for change in (rotate_key, revoke_key):
        with pytest.raises(ConfigError, match="no key named 'alice'"):
            change(path, "alice")


def test_a_name_is_given_once(tmp_path: Path) -> None:
    create_key(tmp_path / "keys", key("alice"))
    with pytest.raises(ConfigError, match="already"):
        create_key(tmp_path / "keys", key("alice"))


def test_changes_arrive_while_a_server_runs(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    create_key(path, key("alice"))
    now = [100.0]
    file = KeyFile(path, lambda: now[0])
    text = create_key(path, key("bob"))
    assert file.table().find(text.encode()) is not None
    path.write_text("broken")
    now[0] += RELOAD_S
    assert file.table().find(text.encode()) is not None, "a broken file leaves the keys as they were"
    path.unlink()
    now[0] += RELOAD_S
    assert file.table().find(text.encode()) is not None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alice lab nothex", "name tenant hash"),
        ("al/ice lab " + "0" * 64, "letters"),
        ("alice lab " + "0" * 64 + " color=red", "unknown option"),
        ("alice lab " + "0" * 64 + " expires=soon", "date or time"),
        ("alice lab " + "0" * 64 + " scope=root", "must be admin"),
        ("alice lab " + "0" * 64 + "\nalice lab " + "1" * 64, "twice"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "keys"
    path.write_text("#quire-keys 1 " + "ab" * 32 + "\n# a comment\n" + line + "\n")
    with pytest.raises(ConfigError, match=problem) as error:
        read_keys(path)
    assert "line " in str(error.value)
    assert "0" * 64 not in str(error.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice: secret\n")
    with pytest.raises(ConfigError, match="quire keys create"):
        read_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "missing")


def test_the_cache_group_is_a_tenants(tmp_path: Path) -> None:
    path, now = tmp_path / "keys", datetime.now(UTC)
    create_key(path, ApiKey("a", "lab", "", created=now, cache_group="pool"))
    create_key(path, ApiKey("b", "lab", "", created=now))
    create_key(path, ApiKey("c", "shop", "", created=now))
    table = read_keys(path)
    assert {name: table.group_of(name) for name in ("lab", "shop", "gone")} == {
        "lab": "+pool",
        "shop": "shop",
        "gone": "gone",
    }
    with pytest.raises(ConfigError, match="cache groups 'pool' and 'other'"):
        create_key(path, ApiKey("d", "lab", "", created=now, cache_group="other"))
    _, tenant, digest, *_ = path.read_text().splitlines()[1].split()
    path.write_text(path.read_text() + f"e {tenant} {digest[::-1]} cache_group=p2\n")
    with pytest.raises(ConfigError, match=r"keys: The keys of the tenant 'lab'"):
        read_keys(path)
