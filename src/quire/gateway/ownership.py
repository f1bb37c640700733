"""`Tenancy`: the tenants of a gateway's key file, and `Owner`: one of them, with its tag on ids.

Ids of stored responses come from the backends, which need not know tenants. The gateway shows an id with a tag,
a keyed hash of tenant and id, and takes an id only with the tag of the tenant that sends it:

    backend ── resp_4f… ──► seal ── resp_4f…-9c3a… ──► client ── resp_4f…-9c3a… ──► open ── resp_4f… ──► backend

Nothing is stored: the key of the hash is derived from the secret in the key file, so a gateway that starts again, and
every other one with the same key file, takes the same ids. With fewer than two tenants ids stay as they are.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from quire.gateway.config import GatewayArgs
from quire.http.edge import TENANT
from quire.http.keys import KeyFile, KeyTable

_TAG_BYTES = 12


@dataclass(frozen=True, slots=True)
class Owner:
    """The tenant of a request. ``seals``: the ids that it is shown have tags, and others are not taken."""

    tenant: str = ""
    key: bytes = b""
    seals: bool = False

    def seal(self, given: str) -> str:
        """Return an id as the tenant is shown it."""
        return f"{given}-{self._tag(given)}" if self.seals and given else given

    def open(self, shown: str) -> str | None:
        """Return the backend's id; None for an id that the tenant was not shown.

        Without ``seals`` an id that has no tag is taken as it is, and one from before with the tenant's tag is opened.
        """
        given, _, tag = shown.rpartition("-")
        if self.key and given and hmac.compare_digest(tag.encode(), self._tag(given).encode()):
            return given
        return None if self.seals else shown

    def _tag(self, given: str) -> str:
        text = f"{self.tenant}\0{given}".encode("utf-8", "surrogatepass")
        return blake2b(text, key=self.key, digest_size=_TAG_BYTES).hexdigest()


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

    def owner(self) -> Owner:
        """Return the tenant of the request that this task serves."""
        known = self._look()
        return Owner() if known is None else Owner(TENANT.get(), known.id_key, known.num_tenants > 1)

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
