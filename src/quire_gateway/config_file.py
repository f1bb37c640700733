"""Read the gateway's TOML file into a `GatewayConfig`. An error names the key, its value and what is allowed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from quire.args import make_args
from quire.errors import ConfigError, nearest
from quire.slo import Slo
from quire_gateway.auto_config import read_auto
from quire_gateway.config import (
    CAUSES,
    BackendArgs,
    Cause,
    DisaggregationArgs,
    GatewayArgs,
    GatewayConfig,
    HealthArgs,
    HedgeArgs,
    ModelArgs,
    ModelConfig,
    RetryArgs,
    RoutingArgs,
    TimeoutArgs,
)
from quire_gateway.filter_config import FilterArgs, FilterConfig
from quire_gateway.prices import Price
from quire_gateway.quotas import Limit
from quire_gateway.region_config import RegionConfig

_TABLES = ("routing", "timeouts", "health", "retries", "backends", "models", "filters", "auto", "regions", "hedging",
           "limits", "prices", "disaggregation")  # fmt: skip
_Args = TypeVar("_Args", RoutingArgs, HealthArgs, RetryArgs, HedgeArgs, DisaggregationArgs, Limit, Price)


def read_config(path: Path) -> GatewayConfig:
    """Read a TOML file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or holds a wrong key or value.
    """
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--config {path}: cannot be read ({reason})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error
    return gateway_config(data, str(path))


def gateway_config(data: Mapping[str, Any], origin: str = "config") -> GatewayConfig:
    """Return the configuration of decoded TOML; ``origin`` begins the errors.

    Raises:
        ConfigError: a key is unknown, or a value is not allowed.
    """
    top = {key: value for key, value in data.items() if key not in _TABLES}
    known = [f.name for f in fields(GatewayArgs)]
    for key in top:
        if key not in known:
            raise ConfigError(f"{origin}: unknown key {key!r}{nearest(key, (*known, *_TABLES))}")
    paths = dict(_table(data, "timeouts", origin))
    own = paths.pop("paths", {})
    limits = dict(_table(data, "limits", origin))
    owners = {
        owner: _named_tables(Limit, limits, owner, f"{origin}: [limits")
        for owner in ("keys", "tenants", "models")
    }
    timeouts = make_args(TimeoutArgs, paths, origin=f"{origin}: [timeouts]")
    server = make_args(GatewayArgs, top, origin=origin)
    config = GatewayConfig(
        server=server,
        routing=_args(RoutingArgs, data, "routing", origin),
        timeouts=timeouts,
        path_timeouts=_path_timeouts(own, timeouts, origin),
        health=_args(HealthArgs, data, "health", origin),
        retries=_args(RetryArgs, data, "retries", origin),
        backends=tuple(_backend(table, where) for table, where in _list(data, "backends", origin)),
        models=_models(_list(data, "models", origin)),
        hedging=_args(HedgeArgs, data, "hedging", origin),
        disaggregation=_disaggregation(data, origin),
        auto=read_auto(_table(data, "auto", origin), origin),
        regions=RegionConfig.from_table(_table(data, "regions", origin), origin),
        filters=tuple(_filter(table, where) for table, where in _list(data, "filters", origin)),
        limits=make_args(Limit, limits, origin=f"{origin}: [limits]"),
        key_limits=owners["keys"],
        tenant_limits=owners["tenants"],
        model_limits=owners["models"],
        prices=_named_tables(Price, dict(data), "prices", f"{origin}: ["),
        slo=_slo(server.slo, origin),
    )
    _check_whole(config, origin)
    return config


def _disaggregation(data: Mapping[str, Any], origin: str) -> DisaggregationArgs | None:
    """Return how prompts are computed by prefill replicas; None: there is no table, and no replica of such a role."""
    roles = {table.get("role", "both") for table in data.get("backends", ()) if isinstance(table, dict)}
    is_on = "disaggregation" in data or (roles != {"both"} and bool(roles))
    return _args(DisaggregationArgs, data, "disaggregation", origin) if is_on else None


def _slo(text: str | None, origin: str) -> Slo | None:
    try:
        return Slo.parse(text) if text is not None else None
    except ConfigError as error:
        raise ConfigError(f"{origin}: {str(error).replace('--slo', 'slo =')}", param="slo") from None


def _check_whole(config: GatewayConfig, origin: str) -> None:
    names = [backend.name for backend in config.backends if backend.name is not None]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{origin}: two backends have the name {name!r}; each needs its own")
    for model in config.models.values():
        for other in model.fallbacks:
            if other in config.models and config.models[other] is model:
                raise ConfigError(f"{origin}: model {model.name!r} has itself ({other!r}) as a fallback")
    for network in config.server.forwarded_allow_ips:
        try:
            ip_network(network, strict=False)
        except ValueError:
            raise ConfigError(
                f"{origin}: forwarded_allow_ips: {network!r} must be an address or a network, such as 10.0.0.0/8"
            ) from None
    if any(not key for key in (*config.server.api_keys, config.server.admin_key or "x")):
        raise ConfigError(f"{origin}: a key is the empty text; leave it out, or give one")


def _table(data: Mapping[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    table = data.get(key, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{origin}: {key} = {table!r} must be a table ([{key}])")
    return table


def _args(kind: type[_Args], data: Mapping[str, Any], key: str, origin: str) -> _Args:
    return make_args(kind, _table(data, key, origin), origin=f"{origin}: [{key}]")


def _named_tables(kind: type[_Args], tables: dict[str, Any], key: str, origin: str) -> dict[str, _Args]:
    """Take the tables below ``key`` out of ``tables``: name → values."""
    own = tables.pop(key, {})
    if not isinstance(own, dict) or not all(isinstance(table, dict) for table in own.values()):
        raise ConfigError(f"{origin}{key}]: {own!r} must be tables of a name each")
    return {name: make_args(kind, values, origin=f"{origin}{key}.{name}]") for name, values in own.items()}


def _list(data: Mapping[str, Any], key: str, origin: str) -> list[tuple[dict[str, Any], str]]:
    """Return each table of ``[[key]]``, with what an error says of its place."""
    tables = data.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{origin}: {key} = {tables!r} must be tables ([[{key}]])")
    return [(table, f"{origin}: {key}[{index}]") for index, table in enumerate(tables)]


def _path_timeouts(tables: Any, default: TimeoutArgs, origin: str) -> dict[str, TimeoutArgs]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(
            f'{origin}: timeouts.paths = {tables!r} must be tables ([timeouts.paths."/v1/completions"])'
        )
    timeouts = {}
    for path, values in tables.items():
        where = f"{origin}: [timeouts.paths.{path!r}]"
        if not path.startswith("/"):
            raise ConfigError(f"{where}: a path begins with '/'")
        make_args(TimeoutArgs, values, origin=where)
        timeouts[path] = replace(default, **values)
    return timeouts


def _backend(values: dict[str, Any], where: str) -> BackendArgs:
    backend = make_args(BackendArgs, values, origin=where)
    sources = [key for key in ("url", "dns", "file") if getattr(backend, key) is not None]
    if len(sources) != 1:
        raise ConfigError(
            f"{where}: {' and '.join(sources) or 'nothing'} given; give one of url, dns and file"
        )
    if backend.url is not None:
        return replace(backend, url=checked_url(backend.url, f"{where}: url"))
    if backend.dns is not None:
        checked_url(f"http://{backend.dns}", f"{where}: dns", f"{backend.dns!r}", "host:port")
        if not backend.dns.rpartition(":")[2].isdigit():
            raise ConfigError(f"{where}: dns = {backend.dns!r} must be host:port")
    return backend


def _filter(values: dict[str, Any], where: str) -> FilterConfig:
    options = values.get("options", {})
    args = make_args(FilterArgs, {k: v for k, v in values.items() if k != "options"}, origin=where)
    words = args.keywords or args.patterns
    kinds = [key for key, value in (("hook", args.hook), ("url", args.url), ("keywords", words)) if value]
    if len(kinds) != 1:
        named = " and ".join(kinds) or "nothing"
        raise ConfigError(f"{where}: {named} given; give one of hook, url, and keywords with patterns")
    if not isinstance(options, dict) or (options and args.hook is None):
        raise ConfigError(f"{where}: options = {options!r} must be a table, and of a hook")
    if args.url is not None:
        checked_url(args.url, f"{where}: url")
    return FilterConfig(replace(args, name=args.name or args.hook or args.url or "keywords"), options)


def checked_url(url: str, where: str, shown: str | None = None, allowed: str = "http://host:port") -> str:
    """Return the base URL of a backend without a slash at its end.

    Raises:
        ConfigError: it is not http(s), has no host, a port beyond 65535, a user, a query or a fragment.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and not (parts.query or parts.fragment or parts.username) and url.isprintable()
    except ValueError:
        good = False
    if not good or " " in url:
        raise ConfigError(f"{where} = {shown or repr(url)} must be {allowed}")
    return url.rstrip("/")


def _models(tables: list[tuple[dict[str, Any], str]]) -> dict[str, ModelConfig]:
    models: dict[str, ModelConfig] = {}
    for values, where in tables:
        split = values.get("split")
        when = _causes(values.get("fallback_when", "failure"), where)
        own = {k: v for k, v in values.items() if k not in ("split", "fallback_when")}
        args = make_args(ModelArgs, own, origin=where)
        if not args.name:
            raise ConfigError(f"{where}: name is required: it must be the name that clients send")
        weights = {args.name: 1.0} if split is None else _split(split, where)
        model = ModelConfig(args.name, weights, args.fallbacks, when)
        for name in (args.name, *args.aliases):
            if name in models:
                raise ConfigError(f"{where}: the name {name!r} belongs to {models[name].name!r} already")
            models[name] = model
    return models


def _causes(causes: Any, where: str) -> frozenset[Cause]:
    """Return what a fallback is taken for: a list of causes, or one of the two words that stood here before lists."""
    if causes == "saturated":
        return frozenset(("failure", "saturated"))
    names = [causes] if isinstance(causes, str) else causes
    if not isinstance(names, list) or not names:
        raise ConfigError(f"{where}: fallback_when = {causes!r} must be a list of {', '.join(CAUSES)}")
    for name in names:
        if name not in CAUSES:
            near = nearest(name, CAUSES) if isinstance(name, str) else ""
            raise ConfigError(
                f"{where}: fallback_when = {causes!r} must be a list of {', '.join(CAUSES)}; {name!r} is none{near}"
            )
    return frozenset(names)


def _split(split: Any, where: str) -> dict[str, float]:
    wrong = not isinstance(split, dict) or not split
    wrong = wrong or any(type(w) not in (int, float) or not 0 <= w < 1e9 for w in split.values())
    if wrong or not any(split.values()):
        raise ConfigError(f"{where}: split = {split!r} must be a table of weights ≥ 0, not all of them 0")
    return {name: float(weight) for name, weight in split.items()}
