"""API keys in a file, as keyed hashes: `quire keys` writes it, `--api-key-file` and the gateway read it.

    #quire-keys 1 1f0c…                                    the secret of the hashes, 32 bytes in hexadecimal
    alice  research  9a41…  created=2026-11-22T09:30:00Z   name, tenant, keyed BLAKE2b-256 of the key, options
    batch  research  77d0…  created=… models=quill,llama-* endpoints=/v1/embeddings expires=2027-01-01T00:00:00Z

A key has 256 random bits and is shown once, when it is created. One keyed hash and one look-up find it among any number
of keys, and the time that they take says nothing about a key that is close to a real one. A file that changes is read
again within a second; a file that cannot be read leaves the keys as they were, and says so in the log.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from quire.errors import ConfigError, clip
from quire.metrics.log import Log

PREFIX = "sk-quire-"
RELOAD_S = 1.0  # how old the file's modification time may be
_HEAD = re.compile(r"#quire-keys 1 ([0-9a-f]{64})")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_OPTIONS = ("created", "expires", "models", "endpoints", "scope", "weight", "cache_group")
GROUP_MARK = "+"  # before the name of a cache group, so that it is no tenant's
log = Log("keys")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One line of the file. ``models`` and ``endpoints`` are patterns (``llama-*``, ``/v1/chat/*``); empty: all."""

    name: str
    tenant: str
    digest: str  # hexadecimal
    created: datetime
    expires: datetime | None = None
    models: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    admin: bool = False  # may also use the admin surface
    weight: float = 1.0  # share of the engine under the order "fair"
    # The group of its tenant, which shares cached blocks with the others of the group.
    cache_group: str = ""

    def is_expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires

    def allows_model(self, model: str) -> bool:
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)

    def allows_endpoint(self, path: str) -> bool:
        return not self.endpoints or any(fnmatchcase(path, pattern) for pattern in self.endpoints)

    def line(self) -> str:
        """Return the key's line in the file."""
        options = {
            "created": _stamp(self.created),
            "expires": _stamp(self.expires) if self.expires else "",
            "models": ",".join(self.models),
            "endpoints": ",".join(self.endpoints),
            "scope": "admin" if self.admin else "",
            "weight": "" if self.weight == 1.0 else f"{self.weight:g}",
            "cache_group": self.cache_group,
        }
        return " ".join([self.name, self.tenant, self.digest, *(f"{k}={v}" for k, v in options.items() if v)])


@dataclass(frozen=True)
class KeyTable:
    """The keys of one file by their hash. Frozen: a change of the file makes a new table."""

    secret: bytes
    keys: Mapping[str, ApiKey]  # digest → key

    @cached_property
    def groups(self) -> Mapping[str, str]:
        """The name within which each tenant shares cached blocks."""
        return cache_groups(self.keys.values())

    def group_of(self, tenant: str) -> str:
        """Return the name within which the tenant shares cached blocks: its own, unless its keys name a group."""
        return self.groups.get(tenant, tenant)

    def digest(self, key: bytes) -> str:
        return hashlib.blake2b(key, key=self.secret, digest_size=32).hexdigest()

    def find(self, key: bytes) -> ApiKey | None:
        """Return the key's line, also if it has expired; None for a key that the file does not have."""
        return self.keys.get(self.digest(key)) if len(key) <= 512 else None


def cache_groups(keys: Iterable[ApiKey]) -> dict[str, str]:
    """Return by tenant the name within which it shares cached blocks: its own, or that of a group.

    Raises:
        ConfigError: the keys of a tenant name different groups.
    """
    named: dict[str, str] = {}
    for key in keys:
        before = named.get(key.tenant, "")
        if before and key.cache_group not in ("", before):
            text = f"The keys of the tenant {key.tenant!r} have the cache groups {before!r} and {key.cache_group!r}"
            raise ConfigError(f"{text}: a tenant is in one group, or in none.")
        named[key.tenant] = before or key.cache_group
    return {tenant: GROUP_MARK + group if group else tenant for tenant, group in named.items()}


class KeyFile:
    """A file of keys that may change while a server reads it."""

    def __init__(self, path: Path, now: Callable[[], float]) -> None:
        self._path = path
        self._now = now  # seconds of a monotonic clock
        self._table = read_keys(path)
        self._stat = _state(path)
        self._looked_s = 0.0

    def table(self) -> KeyTable:
        """Return the keys."""
        now_s = self._now()
        if now_s - self._looked_s >= RELOAD_S:
            self._looked_s = now_s
            if (stat := _state(self._path)) != self._stat:
                self._stat = stat
                try:
                    self._table = read_keys(self._path)
                except ConfigError as error:
                    log.error("keys_unreadable", error=str(error))
        return self._table


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read_keys(path: Path) -> KeyTable:
    """Read a file of keys.

    Raises:
        ConfigError: the file cannot be read, or a line of it is wrong (by its number; no hash is shown).
    """
    try:
        head, *lines = path.read_text().splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The key file {path} cannot be read: {error}.", param="api_key_file") from None
    if not (match := _HEAD.fullmatch(head.strip())):
        raise ConfigError(
            f"{path} is no key file: its first line is not '#quire-keys 1 <secret>'. `quire keys create` makes one.",
            param="api_key_file",
        )
    keys: dict[str, ApiKey] = {}
    names: set[str] = set()
    for number, line in enumerate(lines, 2):
        if line.strip() and not line.startswith("#"):
            key = _parse(line.split(), f"{path}, line {number}")
            if key.name in names:
                raise ConfigError(f"{path}, line {number}: the name {key.name!r} is there twice.")
            names.add(key.name)
            keys[key.digest] = key
    try:
        cache_groups(keys.values())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", param="api_key_file") from None
    return KeyTable(bytes.fromhex(match[1]), keys)


def _parse(words: list[str], where: str) -> ApiKey:
    if len(words) < 3 or not re.fullmatch(r"[0-9a-f]{64}", words[2]):
        raise ConfigError(f"{where}: must be 'name tenant hash [option=value …]'.")
    for word in words[:2]:
        check_name(word, where)
    options = dict(word.partition("=")[::2] for word in words[3:])
    if unknown := set(options) - set(_OPTIONS):
        raise ConfigError(f"{where}: unknown option {sorted(unknown)}; there are {', '.join(_OPTIONS)}.")
    if (scope := options.get("scope", "admin")) != "admin":
        raise ConfigError(f"{where}: scope={clip(scope)} must be admin.")
    return ApiKey(
        name=words[0],
        tenant=words[1],
        digest=words[2],
        created=read_time(options.get("created", "1970-01-01"), where),
        expires=read_time(options["expires"], where) if "expires" in options else None,
        models=tuple(filter(None, options.get("models", "").split(","))),
        endpoints=tuple(filter(None, options.get("endpoints", "").split(","))),
        admin="scope" in options,
        weight=check_weight(options.get("weight", "1"), where),
        cache_group=check_name(options["cache_group"], where) if "cache_group" in options else "",
    )


def check_name(word: str, where: str) -> str:
    """Return the name of a key or tenant if it is one word of letters, digits and ``._@-``.

    Raises:
        ConfigError: it is not.
    """
    if not _WORD.fullmatch(word):
        raise ConfigError(f"{where}: {clip(word)} must be 1 to 64 letters, digits, '.', '_', '@' or '-'.")
    return word


def check_weight(text: str, where: str) -> float:
    """Read a share of the engine.

    Raises:
        ConfigError: it is no number above 0.
    """
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0.001 <= weight <= 1000.0:
        raise ConfigError(f"{where}: weight = {clip(text)} must be a number in 0.001…1000.")
    return weight


def read_time(text: str, where: str) -> datetime:
    """Read a date or a time in ISO form; UTC where it names no zone.

    Raises:
        ConfigError: it is neither.
    """
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{where}: {clip(text)} must be a date or time, such as 2027-01-31 or 2027-01-31T12:00:00Z."
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _stamp(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# Changing the file. Each change is one atomic replacement, and a lock keeps two commands apart.


def create_key(path: Path, key: ApiKey) -> str:
    """Add a key to the file, which is made where it is missing, and return the key's text. ``key.digest`` is not read.

    Raises:
        ConfigError: the name is taken, or the file is wrong.
    """
    with _changing(path) as table:
        if any(known.name == key.name for known in table.keys.values()):
            raise ConfigError(f"There is a key named {key.name!r} already; `quire keys rotate` replaces it.")
        cache_groups([*table.keys.values(), key])
        return _put(path, table, key)


def rotate_key(path: Path, name: str) -> str:
    """Give the key ``name`` a new text, which is returned; the old one ends at once.

    Raises:
        ConfigError: there is no such key.
    """
    with _changing(path) as table:
        old = _named(table, name, path)
        rest = {digest: key for digest, key in table.keys.items() if digest != old.digest}
        return _put(path, KeyTable(table.secret, rest), old)


def revoke_key(path: Path, name: str) -> None:
    """Remove the key ``name``.

    Raises:
        ConfigError: there is no such key.
    """
    with _changing(path) as table:
        old = _named(table, name, path)
        _write(path, KeyTable(table.secret, {d: key for d, key in table.keys.items() if d != old.digest}))


def _named(table: KeyTable, name: str, path: Path) -> ApiKey:
    for key in table.keys.values():
        if key.name == name:
            return key
    raise ConfigError(f"{path} has no key named {clip(name)}.")


def _put(path: Path, table: KeyTable, key: ApiKey) -> str:
    text = PREFIX + secrets.token_urlsafe(32)
    key = replace(key, digest=table.digest(text.encode()))
    _write(path, KeyTable(table.secret, {**table.keys, key.digest: key}))
    return text


@contextmanager
def _changing(path: Path) -> Iterator[KeyTable]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise ConfigError(f"The key file {path} cannot be written: {error}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield read_keys(path) if path.exists() else KeyTable(secrets.token_bytes(32), {})
    finally:
        os.close(lock)


def _write(path: Path, table: KeyTable) -> None:
    text = "\n".join([f"#quire-keys 1 {table.secret.hex()}", *(key.line() for key in table.keys.values())])
    new = path.with_name(path.name + ".new")
    descriptor = os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
