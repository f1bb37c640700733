"""`Tenancy`: the tenants of a gateway's key file, and `Owner`: one of them, with its tag on ids.

Ids of stored responses come from the backends, which need not know tenants. The gateway shows an id with a tag,
and takes an id only with the tag of the tenant that sends it:

    backend ── resp_4f… ──► seal ── resp_4f…-k2xq… ──► client ── resp_4f…-k2xq… ──► open ── resp_4f… ──► backend

A tag is a hint, four characters that are a keyed hash of the backend's name, and a keyed hash of tenant, id and hint.
Tags of ids from before there were hints, and of those whose backend is not known, are 24 hexadecimal digits.

Nothing is stored: the key of the hashes is derived from the secret in the key file, so a gateway that starts again, and
every other one with the same key file, takes the same ids and finds the backends of the same names. With fewer than two
tenants ids stay as they are.
"""

from __future__ import annotations

import hmac
from base64 import b32encode
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from quire.http.keys import KeyFile, KeyTable
from quire_gateway.config import GatewayArgs

RESPONSES = "/v1/responses"
NAMING_PATHS = (RESPONSES, f"{RESPONSES}/input_tokens")  # whose requests name stored responses
_TAG_BYTES = 12  # of a tag without a hint: as many digits as one with a hint has characters
_TAG_CHARS = 24
_HINT_CHARS = 4  # 20 bits


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant of a request. ``seals``: the ids that it is shown have tags, and others are not taken."""

    tenant: str = ""
    key: bytes = b""
    seals: bool = False

    def seal(self, own_id: str, hint: str = "") -> str:
        """Return an id as the tenant is shown it. ``hint``: of the backend that holds what it names, if known."""
        return f"{own_id}-{self._tag(own_id, hint)}" if self.seals and own_id else own_id

    def open(self, shown_id: str) -> str | None:
        """Return the backend's id; None for an id that the tenant was not shown.

        Without ``seals`` an id that has no tag is taken as it is, and one from before with the tenant's tag is opened.
        """
        own_id, _, tag = shown_id.rpartition("-")
        if (
            self.key
            and own_id
            and (self._is_tag(tag, own_id, tag[:_HINT_CHARS]) or self._is_tag(tag, own_id))
        ):
            return own_id
        return None if self.seals else shown_id

    def hint_in(self, shown_id: str) -> str:
        """Return the hint in an id that the tenant was shown; empty for one without."""
        own_id, _, tag = shown_id.rpartition("-")
        hint = tag[:_HINT_CHARS]
        return hint if self.key and own_id and self._is_tag(tag, own_id, hint) else ""

    def hint_of(self, backend: str) -> str:
        """Return the hint of a backend by its name; two backends may have the same one."""
        return _chars(
            blake2b(backend.encode("utf-8", "surrogatepass"), key=self.key, digest_size=5).digest()
        )[:_HINT_CHARS]

    def _is_tag(self, tag: str, own_id: str, hint: str = "") -> bool:
        return hmac.compare_digest(tag.encode(), self._tag(own_id, hint).encode())

    def _tag(self, own_id: str, hint: str) -> str:
        text = f"{self.tenant}\0{own_id}".encode("utf-8", "surrogatepass")
        if not hint:
            return blake2b(text, key=self.key, digest_size=_TAG_BYTES).hexdigest()
        of_hint = text + b"\0" + hint.encode("utf-8", "surrogatepass")
        return (hint + _chars(blake2b(of_hint, key=self.key, digest_size=15).digest()))[:_TAG_CHARS]


def _chars(digest: bytes) -> str:
    """Return a digest in the letters and digits of base 32, which names and addresses may have."""
    return b32encode(digest).decode().lower()


@dataclass(frozen=True, slots=True)
class _Known:
    """What follows from one table of keys."""

    table: KeyTable
    num_tenants: int
    num_groups: int
    id_key: bytes
    salt_key: bytes


class Tenancy:
    """The tenants of a gateway. Keys of ``api_keys`` have none: together they count as one more."""

    def __init__(self, args: GatewayArgs, now: Callable[[], float]) -> None:
        self.key_file = KeyFile(Path(args.key_file), now) if args.key_file is not None else None
        self._num_without = int(bool(args.api_keys))
        self._known: _Known | None = None

    @property
    def has_groups(self) -> bool:
        """Whether there are two tenants that may not share cached blocks."""
        known = self._look()
        return known is not None and known.num_groups > 1

    @property
    def salt_key(self) -> bytes:
        """The key of the hashes that salts are."""
        known = self._look()
        assert known is not None, "there is no key file"
        return known.salt_key

    def owner(self, tenant: str) -> Owner:
        """Return a tenant as the owner of ids."""
        known = self._look()
        return Owner() if known is None else Owner(tenant, known.id_key, known.num_tenants > 1)

    def _look(self) -> _Known | None:
        if self.key_file is None:
            return None
        table = self.key_file.table()
        if self._known is None or self._known.table is not table:
            groups = table.groups
            self._known = _Known(
                table,
                len(groups) + self._num_without,
                len(set(groups.values())) + self._num_without,
                _derived(table.secret, b"quire.ids.v1"),
                _derived(table.secret, b"quire.salts.v1"),
            )
        return self._known


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return blake2b(secret, digest_size=32, person=purpose).digest()
