"""`Salts`: what keeps the tenants of a gateway apart in the prefix caches of its backends, and in its own index.

A backend shares cached blocks between requests of one ``cache_salt``. The gateway sets it to a keyed hash of the
tenant's cache group and of the salt that the client sent, so no client can choose the salt of another group, and the
digests by which it places requests (`quire.text.digest`) begin with the same one. The key is derived from the secret
in the key file: gateways that share the file share cached blocks. With one group of tenants nothing is set.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from hashlib import blake2b

from quire.http.call import Call
from quire.http.wire import not_allowed
from quire.metrics.log import Log
from quire_gateway.client_request import ClientRequest
from quire_gateway.config import BackendArgs
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend
from quire_gateway.ownership import Tenancy
from quire_gateway.stage import Stage

# Paths whose prompts a backend caches.
SALTED_PATHS = frozenset(
    (
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/score",
        "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/pooling", "/classify", "/completion", "/infill",
        "/generate", "/generate_stream", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/embed",
        "/embed_all", "/embed_sparse", "/predict", "/similarity", "/v2/embed",
    )
)  # fmt: skip
_TAKE_SALTS = ("quire", "vllm", "sglang")  # as the servers name themselves in the cards of their models
_SALT_BYTES = 16
log = Log("gateway")


class Salts(Stage):
    """The salts of one gateway."""

    paths = SALTED_PATHS

    def __init__(self, tenancy: Tenancy) -> None:
        self._tenancy = tenancy
        self._named: set[str] = set()  # backends that take none, once the log has them

    @property
    def are_used(self) -> bool:
        """Whether there are tenants to keep apart."""
        return self._tenancy.has_groups

    async def enter(self, exchange: Exchange) -> None:
        """Raises `RequestError`: the client's ``cache_salt`` is not a text."""
        assert exchange.request is not None
        if self.are_used:
            exchange.request = replace(exchange.request, salt=self._salt(exchange.request, exchange.call))

    def _salt(self, request: ClientRequest, call: Call) -> str:
        salt = request.body.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise not_allowed("cache_salt", salt, "a string", "invalid_type")
        text = f"{call.salt_group}\n{salt or ''}".encode("utf-8", "surrogatepass")
        return blake2b(text, key=self._tenancy.salt_key, digest_size=_SALT_BYTES).hexdigest()

    def listed(self, backend: Backend, owners: Collection[str]) -> None:
        """A backend was polled. ``owners``: what the cards of its models say of the server."""
        backend.takes_salt = takes_salt(backend.args, bool(backend.fingerprints), owners)
        if not backend.takes_salt and self.are_used and backend.name not in self._named:
            self._named.add(backend.name)
            log.warning(
                "tenants_share_cache",
                backend=backend.name,
                why="it is not known to take a cache_salt: its prefix cache is shared by all tenants (takes_salt)",
            )


def takes_salt(args: BackendArgs, is_quire: bool, owners: Collection[str]) -> bool:
    """Return whether a backend reads ``cache_salt``: as configured, else by the server that it says it is."""
    if args.takes_salt is not None:
        return args.takes_salt
    return is_quire or any(owner.lower() in _TAKE_SALTS for owner in owners)
