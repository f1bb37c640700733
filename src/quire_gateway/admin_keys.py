"""``/admin/keys`` and ``/admin/limits``: keys, limits and what is left of them. A key's text is shown once."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.errors import ConfigError, NotFoundError, RequestError, clip
from quire.http.body import read_json
from quire.http.json_page import json_response
from quire.http.keys import (
    ApiKey,
    check_name,
    check_weight,
    create_key,
    read_keys,
    read_time,
    revoke_key,
    rotate_key,
)
from quire.http.limits import INLINE_BYTES
from quire.http.refusals import HttpError, Refusal
from quire.http.wire import Boolean, Number, Text, Texts, Wire, parse
from quire.metrics.log import Log
from quire_gateway.quotas import NANO, Limit, Unit
from quire_gateway.state import GatewayState

if TYPE_CHECKING:
    from quire_gateway.limits import Allowance

log = Log("gateway")


class NewKey(Wire):
    """Body of ``POST /admin/keys``: what `quire keys create` takes."""

    name: Text
    tenant: Text | None = None
    models: Texts | None = None
    endpoints: Texts | None = None
    expires: Text | None = None
    weight: Number = 1.0
    admin: Boolean = False
    cache_group: Text | None = None


class AdminKeys:
    """The handlers. Errors of the key file are the caller's: 400, or 404 for a name that it does not have."""

    def __init__(self, state: GatewayState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        return [
            Route("/admin/keys", self.list, methods=["GET"]),
            Route("/admin/keys", self.create, methods=["POST"]),
            Route("/admin/keys/{name}/rotate", self.rotate, methods=["POST"]),
            Route("/admin/keys/{name}", self.revoke, methods=["DELETE"]),
            Route("/admin/limits", self.limits, methods=["GET"]),
        ]

    async def list(self, request: Request) -> Response:
        """Names, tenants and rights; neither keys nor their hashes."""
        keys = read_keys(self._path()).keys.values()
        return json_response({"object": "list", "data": [_card(key) for key in keys]})

    async def create(self, request: Request) -> Response:
        """Add a key; the answer has its text, this once. Requests may carry it within a second."""
        body = parse(NewKey, await read_json(request.scope, request.receive, INLINE_BYTES))
        try:
            key = ApiKey(
                name=check_name(body.name, "name"),
                tenant=check_name(body.tenant or body.name, "tenant"),
                digest="",
                created=datetime.now(UTC),
                expires=read_time(body.expires, "expires") if body.expires else None,
                models=_patterns("models", body.models),
                endpoints=_patterns("endpoints", body.endpoints),
                admin=body.admin,
                weight=check_weight(str(body.weight), "weight"),
                cache_group=check_name(body.cache_group, "cache_group") if body.cache_group else "",
            )
            text = await asyncio.to_thread(create_key, self._path(), key)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        log.info("key_created", key=key.name, tenant=key.tenant)
        return json_response(_card(key) | {"key": text}, 201)

    async def rotate(self, request: Request) -> Response:
        """Replace a key by a new one, which the answer has; the old one ends within a second."""
        key = self._named(request)
        text = await asyncio.to_thread(rotate_key, self._path(), key.name)
        log.info("key_rotated", key=key.name, tenant=key.tenant)
        return json_response(_card(key) | {"key": text})

    async def revoke(self, request: Request) -> Response:
        """Remove a key; it ends within a second."""
        key = self._named(request)
        await asyncio.to_thread(revoke_key, self._path(), key.name)
        log.info("key_revoked", key=key.name, tenant=key.tenant)
        return json_response({"name": key.name, "deleted": True})

    async def limits(self, request: Request) -> Response:
        """The configured limits, and what each key and tenant has left of them."""
        state, config = self._state, self._state.config
        keys = (
            read_keys(self._path()).keys.values() if config.server.key_file and self._path().exists() else ()
        )
        owners = {(key.name, key.tenant) for key in keys} or {("", "")}
        limits = state.tenants.limits if state.tenants is not None else None
        models = list(config.model_limits)
        allowances = await limits.allowances(sorted(owners), models) if limits is not None else []
        return json_response(
            {
                "books": "redis" if config.server.redis else "memory",
                "is_degraded": limits is not None and limits.is_degraded,
                "default": _set_limits(config.limits),
                "keys": {name: _set_limits(limit) for name, limit in config.key_limits.items()},
                "tenants": {name: _set_limits(limit) for name, limit in config.tenant_limits.items()},
                "models": {name: _set_limits(limit) for name, limit in config.model_limits.items()},
                "quotas": [_quota(allowance) for allowance in allowances],
            }
        )

    def _path(self) -> Path:
        file = self._state.config.server.key_file
        if file is None:
            text = "The gateway has no key_file; set one in its configuration."
            raise HttpError(Refusal(409, text, code="no_key_file"))
        return Path(file)

    def _named(self, request: Request) -> ApiKey:
        name = request.path_params["name"]
        for key in read_keys(self._path()).keys.values():
            if key.name == name:
                return key
        raise NotFoundError(f"There is no key named {clip(name)}.", code="key_not_found")


def _patterns(name: str, patterns: list[str] | None) -> tuple[str, ...]:
    """Return patterns that a line of the key file can hold."""
    for pattern in patterns or ():
        if not pattern or not pattern.isprintable() or set(pattern) & {" ", ","}:
            raise ConfigError(f"{name}: {clip(pattern)} must be a pattern without spaces and commas.")
    return tuple(patterns or ())


def _card(key: ApiKey) -> dict[str, Any]:
    return {
        "name": key.name,
        "tenant": key.tenant,
        "created": key.created.isoformat(),
        "expires": key.expires.isoformat() if key.expires else None,
        "models": key.models,
        "endpoints": key.endpoints,
        "weight": key.weight,
        "scope": "admin" if key.admin else None,
    }


def _quota(allowance: Allowance) -> dict[str, Any]:
    quota = allowance.quota
    unit = NANO if quota.unit is Unit.MONEY else 1
    return {
        "name": quota.name,
        "unit": str(quota.unit),
        "period": quota.period,
        "capacity": quota.capacity / unit,
        "remaining": allowance.remaining / unit,
        "reset_s": round(allowance.reset_s, 3),
    }


def _set_limits(limit: Limit) -> dict[str, float]:
    return {name: value for name, value in asdict(limit).items() if value is not None}
