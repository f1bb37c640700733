"""`GatewayConfig`: the gateway's TOML file as frozen data; `config_file` reads it.

    host = "0.0.0.0"
    [routing]
    policy = "prefix-predicted"
    [[backends]]
    url = "http://10.0.0.1:8000"
    [[models]]
    name = "chat"
    split = { quill-v1 = 9, quill-v2 = 1 }
    fallbacks = ["quill-small"]

Names, types and defaults are the dataclasses below; ``settings.toml`` has their meaning and ranges.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from quire.args import ServerArgs, defaults
from quire.http.browser_guard import BrowserRules, allowed_hosts
from quire.http.listen import resolved
from quire.slo import Slo
from quire_gateway.auto_config import AutoConfig
from quire_gateway.filter_config import FilterConfig
from quire_gateway.prices import Price
from quire_gateway.quotas import Limit
from quire_gateway.region_config import RegionConfig
from quire_gateway.routing import DEFAULT_CAPACITY, Policy

# What a fallback may be taken for. failure: its backends are down, fail or give no valid answer; saturated: they have
# no room (429, 503, max_requests); 429 and 5xx: any answer of that status; the last two are refusals of the request.
Cause = Literal["failure", "saturated", "429", "5xx", "context_length", "content_filter"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
# What a replica does of a request: its prompt for others, its answer with a prompt from others, or all.
Role = Literal["prefill", "decode", "both"]
_SERVER = defaults(ServerArgs)


@dataclass(frozen=True, slots=True)
class GatewayArgs:
    """Top-level keys."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    gateway_key: str | None = None
    default_model: str | None = None
    stand_ins: tuple[str, ...] = ()
    key_file: str | None = None
    redis: str | None = None
    ledger: str | None = None
    ledger_spool: str | None = None
    slo: str | None = None
    max_body_mib: int = _SERVER["max_body_mib"]
    max_answer_mib: int = 64
    batch_dir: str | None = None
    max_file_mib: int = _SERVER["max_file_mib"]
    drain_timeout_s: float = _SERVER["drain_timeout_s"]
    access_log: bool = False
    access_log_file: str | None = None
    forwarded_allow_ips: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    metrics_tenants: bool = False

    @property
    def checks_keys(self) -> bool:
        return bool(self.api_keys) or self.key_file is not None

    @property
    def browser_rules(self) -> BrowserRules:
        """Raises `ConfigError`: ``allowed_hosts`` has what is no name, or ``host`` is not known."""
        address = resolved(self.host, self.port)[0]
        return BrowserRules(self.cors_origins, allowed_hosts(address, self.allowed_hosts, "allowed_hosts"))


@dataclass(frozen=True, slots=True)
class RoutingArgs:
    """``[routing]``"""

    policy: Policy = "prefix-predicted"
    max_load_ratio: float = 1.25
    piece_bytes: int = 1024
    index_pieces: int = DEFAULT_CAPACITY
    index_ttl_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class TimeoutArgs:
    """``[timeouts]``, and ``[timeouts.paths."/v1/…"]`` for one path."""

    connect_s: float = 2.0
    first_token_s: float | None = None
    idle_s: float = 60.0
    total_s: float = 600.0
    stream_total_s: float | None = None
    ready_s: float = 30.0


@dataclass(frozen=True, slots=True)
class HealthArgs:
    """``[health]``"""

    interval_s: float = 1.0
    timeout_s: float = defaults(TimeoutArgs)["connect_s"]
    max_failures: int = 5
    error_share: float = 0.5
    slow_factor: float = 10.0
    open_s: float = 5.0
    max_open_s: float = 120.0
    slow_start_s: float = 10.0
    panic_share: float = 0.5


@dataclass(frozen=True, slots=True)
class RetryArgs:
    """``[retries]``"""

    attempts: int = 3
    budget: float = 0.2
    reserve: int = 10


@dataclass(frozen=True, slots=True)
class HedgeArgs:
    """``[hedging]``"""

    after_s: float | None = None
    whole_after_s: float | None = None
    max_prompt_tokens: int = 1000
    budget: float = 0.05


@dataclass(frozen=True, slots=True)
class DisaggregationArgs:
    """``[disaggregation]``"""

    min_tokens: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class BackendArgs:
    """One of ``[[backends]]``; exactly one of ``url``, ``dns`` and ``file``."""

    name: str | None = None
    url: str | None = None
    dns: str | None = None
    file: str | None = None
    models: tuple[str, ...] = ()
    api_key: str | None = None
    health_path: str | None = None
    max_requests: int | None = None
    region: str | None = None
    role: Role = "both"
    takes_salt: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """One of ``[[models]]``. ``split`` is kept apart: name that backends serve → weight."""

    name: str = ""
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    fallback_when: tuple[str, ...] = ("failure",)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model that clients may name."""

    name: str
    split: Mapping[str, float]  # name that backends serve → weight
    fallbacks: tuple[str, ...] = ()
    when: frozenset[Cause] = frozenset(("failure",))  # what a fallback is taken for


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything that the gateway is built from."""

    server: GatewayArgs = field(default_factory=GatewayArgs)
    routing: RoutingArgs = field(default_factory=RoutingArgs)
    timeouts: TimeoutArgs = field(default_factory=TimeoutArgs)
    path_timeouts: Mapping[str, TimeoutArgs] = field(default_factory=dict)
    health: HealthArgs = field(default_factory=HealthArgs)
    retries: RetryArgs = field(default_factory=RetryArgs)
    backends: tuple[BackendArgs, ...] = ()
    models: Mapping[str, ModelConfig] = field(default_factory=dict)  # by name and alias
    filters: tuple[FilterConfig, ...] = ()
    auto: AutoConfig | None = None
    regions: RegionConfig | None = None
    hedging: HedgeArgs = field(default_factory=HedgeArgs)
    disaggregation: DisaggregationArgs | None = None
    limits: Limit = field(default_factory=Limit)  # of each key that has none of its own
    key_limits: Mapping[str, Limit] = field(default_factory=dict)
    tenant_limits: Mapping[str, Limit] = field(default_factory=dict)
    model_limits: Mapping[str, Limit] = field(default_factory=dict)
    prices: Mapping[str, Price] = field(default_factory=dict)  # by the name that backends serve
    slo: Slo | None = None  # what goodput counts

    @property
    def has_limits(self) -> bool:
        """Whether any request can be above a limit."""
        owned = (self.key_limits, self.tenant_limits, self.model_limits)
        return any(owned) or bool(self.limits.quotas(""))

    @property
    def counts_tokens(self) -> bool:
        """Whether every answer must say what it used."""
        return self.server.ledger is not None or self.has_limits

    @property
    def has_replica_key(self) -> bool:
        """Whether replicas of Quire can know this gateway."""
        return self.server.gateway_key is not None or self.server.admin_key is not None

    def timeouts_of(self, path: str) -> TimeoutArgs:
        return self.path_timeouts.get(path, self.timeouts)
