"""What the endpoints of one app share: engine, settings, metrics, clocks, running requests, stored responses."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from quire.api.busy import Busy
from quire.config import CacheConfig, EngineConfig, ModelConfig
from quire.engine.frontend import Frontend
from quire.engine.large_body import LargeBodies
from quire.engine.prompts import ModelInfo
from quire.errors import ConfigError, NotFoundError, clip
from quire.http.call import Call
from quire.http.refusals import LATEST, PLACEHOLDERS
from quire.jobs.disk import write_json
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import Log
from quire.metrics.prometheus import ServerMetrics
from quire.metrics.trace import RequestTracer
from quire.private import private_folder
from quire.request import Adapter
from quire.slo import Slo
from quire.text.chat_template import ChatTemplate
from quire.text.output.formats import FORMATS, OutputFormat
from quire.text.output.generic import format_of

if TYPE_CHECKING:
    from quire.http.keys import KeyFile

_STORED_BYTES = 1024  # that a stored answer takes beside its texts: bounds their number, too
log = Log("api")


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Settings of the HTTP API. The served names are `ModelInfo.names`."""

    version: str = "0"
    system_fingerprint: str = "fp_unknown"  # see `fingerprint`
    api_keys: tuple[str, ...] = ()  # with no key_file either, no key is needed
    key_file: KeyFile | None = None
    gateway_key: str | None = None  # lets a gateway ask for tagged streams, see `quire.api.relayed`
    cors_origins: tuple[str, ...] = ()  # see `quire.http.browser_guard`, also for the next
    allowed_hosts: tuple[str, ...] | None = None
    lenient: bool = False  # accept every unknown request field
    strict_fields: bool = False  # refuse every unknown request field
    max_body_bytes: int = 32 * 2**20
    tool_format: str = "auto"  # a name of quire.text.output.FORMATS; auto: what the chat template shows
    cache: CacheConfig | None = None  # where gateways are told which blocks there are
    retry_after_s: int = 1  # sent with 503
    # Of a request for many texts, in the engine at once: two steps' worth, so that other requests get their share.
    tokens_at_once: int = 4096
    cache_config: Mapping[str, object] = field(default_factory=dict)  # labels of vllm:cache_config_info
    response_store_bytes: int = 64 * 2**20  # of /v1/responses; 0 stores none
    response_dir: Path | None = None  # of those that were made in the background
    journal_dir: Path | None = None  # of streams that can be resumed
    journal_bytes: int = 256 * 2**20
    model: ModelConfig | None = None  # what Ollama's clients are told of the model
    stand_ins: tuple[str, ...] = PLACEHOLDERS  # names of whatever is served; * stands for anything


@dataclass(frozen=True, slots=True)
class ApiState:
    """The engine, the settings, the metrics and two clocks."""

    frontend: Frontend
    settings: ApiSettings
    metrics: ServerMetrics
    now: Callable[[], float]  # monotonic seconds, for latencies
    unix_time: Callable[[], float]  # seconds since 1970, for "created"
    new_id: Callable[[], str]  # 32 hexadecimal digits, unique
    started_unix: int
    reasons: bool  # the model writes reasoning, which is separated
    responses: ResponseStore
    running: RunningRequests
    bodies: LargeBodies
    busy: Busy
    tracer: RequestTracer | None = None
    forecast: TtftForecast | None = None  # with --slo

    def output_format(self, has_tools: bool) -> OutputFormat:
        """Return how the model writes reasoning and calls."""
        return output_format(self.settings, self.frontend.chat_template, has_tools=has_tools)

    @property
    def model(self) -> ModelInfo:
        return self.frontend.model

    def check_model(self, name: str | None) -> str:
        """Return the name that the answer carries: the given one of the model or an adapter, or the model's first.

        Raises:
            NotFoundError: ``name`` is not served; lists the names that are.
        """
        names = self.model.names
        if name is None:
            return names[0]
        if name.endswith(LATEST) and name not in names:
            name = name.removesuffix(LATEST)
        if name not in names and name not in self.adapter_names:
            if any(fnmatchcase(name, pattern) for pattern in self.settings.stand_ins):
                return names[0]
            served = ", ".join(repr(n) for n in names)
            loaded = ", ".join(repr(n) for n in self.adapter_names)
            text = f"The model {clip(name)} is not served here. Served: {served}."
            raise NotFoundError(
                text + (f" Adapters: {loaded}." if loaded else ""), param="model", code="model_not_found"
            )
        return name

    def unread(self, body: Any, call: Call) -> list[str]:
        """Return the fields of a body that are for the scheduler, and that its order does not read."""
        order = self.frontend.stats().order
        if not order or not isinstance(body, dict):
            return []
        read = {"priority": order == "priority", "user": self.reads_tenants(call)}
        return [name for name, is_read in read.items() if body.get(name) and not is_read]

    def reads_tenants(self, call: Call) -> bool:
        """Whether the order reads the tenant that a request names; that of its key replaces it."""
        return self.frontend.stats().order in ("", "fair") and not call.tenant

    def continuable_with(self, name: str) -> str:
        """Return a digest of all that the output of model ``name`` depends on, beside the request.

        Where it is equal, another replica can continue a stream.
        """
        adapter, settings, model = self.adapter_of(name), self.settings, self.model
        sources = sorted(self.frontend.chat_template.sources.items())
        limits = (model.max_model_len, model.eos_token_ids, sorted(model.generation_defaults.items()))
        scope = (settings.system_fingerprint, settings.tool_format, adapter and adapter.key, sources, limits)
        return hashlib.blake2b(repr(scope).encode(), digest_size=12).hexdigest()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        registry = self.frontend.adapters
        return () if registry is None else tuple(registry.adapters)

    def adapter_of(self, model: str) -> Adapter | None:
        """Return the adapter that a request for ``model`` runs with; None: the base model.

        Raises:
            NotFoundError: the adapter was unloaded since `check_model`.
        """
        registry = self.frontend.adapters
        if registry is None or model in self.model.names:
            return None
        return registry.find(model)


def output_format(settings: ApiSettings, template: ChatTemplate, *, has_tools: bool) -> OutputFormat:
    """Return --tool-format, or what the model's chat template shows."""
    if settings.tool_format != "auto":
        return FORMATS[settings.tool_format]
    if not template.names:
        return FORMATS["plain"]
    return format_of(template.source(has_tools))


def is_busy(frontend: Frontend) -> bool:
    """Whether requests wait for the engine now, or it takes none: batches pause then."""
    return frontend.state != "ready" or frontend.stats().num_waiting > 0


def fingerprint(config: EngineConfig, version: str) -> str:
    """Return ``system_fingerprint``: equal fingerprints and seeds give equal tokens."""
    scope = (
        version,
        config.cache.model_key,
        config.model.dtype,
        config.model.kv_dtype,
        config.model.quantize,
        config.cache.block_size,
        config.device.kind,
        config.runner.kernels,
        config.device.native,
    )
    return "fp_" + hashlib.blake2b(repr(scope).encode(), digest_size=6).hexdigest()


class Cancellable(Protocol):
    """A request that is running."""

    @property
    def owner(self) -> str:
        """Return the tenant that it runs for."""

    async def cancel(self) -> None:
        """End it now; its client gets an error."""

    def describe(self, now_s: float) -> dict[str, Any]:
        """Return its line in ``GET /requests``."""


class RunningRequests:
    """The running requests in order of arrival, by the id of the answer and by ``x-request-id``."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[frozenset[str], Cancellable]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def entered(self, ids: frozenset[str], request: Cancellable) -> Iterator[None]:
        """List ``request`` while the block runs."""
        key, self._next = self._next, self._next + 1
        self._requests[key] = (ids, request)
        try:
            yield
        finally:
            del self._requests[key]

    def named(self, request_id: str) -> list[Cancellable]:
        """Return the requests of this id, which clients may use more than once."""
        return [request for ids, request in self._requests.values() if request_id in ids]

    def describe(self, now_s: float, owner: str | None = None) -> list[dict[str, Any]]:
        """Return their lines; ``owner``: those of this tenant alone."""
        requests = [request for _, request in self._requests.values()]
        return [each.describe(now_s) for each in requests if owner in (None, each.owner)]


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, its input and the conversation that it ends, all as JSON text."""

    response: bytes
    input_items: bytes
    messages: bytes  # as a chat template reads them, without instructions; the answer at the end

    @property
    def num_bytes(self) -> int:
        return _STORED_BYTES + len(self.response) + len(self.input_items) + len(self.messages)

    def conversation(self) -> list[dict[str, Any]]:
        return list(msgspec.json.decode(self.messages))


class ResponseStore:
    """Answers of ``/v1/responses`` in memory: at most ``max_bytes``, the least recently used are dropped first.

    A tenant finds its own answers alone. With a folder, answers made in the background are on disk too, as ID.json, so
    that a restart does not lose them.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        """Read the folder.

        Raises:
            ConfigError: it cannot be used.
        """
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._items: OrderedDict[tuple[str, str], Stored] = OrderedDict()  # by tenant and id
        self._folder = folder
        try:
            if folder is not None:
                private_folder(folder, files="*")
                self._read(folder)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"The folder {folder} of responses cannot be used: {error}.") from error

    def _read(self, folder: Path) -> None:
        for path in sorted(folder.glob("resp_*.json"), key=lambda path: path.stat().st_mtime_ns):
            tenant, stored = msgspec.json.decode(path.read_bytes(), type=tuple[str, Stored])
            self._add((tenant, path.stem), stored)

    def __len__(self) -> int:
        return len(self._items)

    def put(self, tenant: str, response_id: str, stored: Stored, *, durable: bool = False) -> None:
        """Keep an answer under its id. ``durable``: on disk, too, as long as there is room on it."""
        if durable and self._folder is not None:
            try:
                write_json(self._folder / f"{response_id}.json", (tenant, stored))
            except OSError as error:
                log.error("response_not_written", id=response_id, error=str(error))
        self._add((tenant, response_id), stored)

    def _add(self, key: tuple[str, str], stored: Stored) -> None:
        before = self._items.pop(key, None)  # an answer that a gateway resumed here twice
        self.num_bytes -= before.num_bytes if before is not None else 0
        self._items[key] = stored
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self.max_bytes:
            (_, oldest_id), oldest = self._items.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
            self._unlink(oldest_id)

    def _unlink(self, response_id: str) -> None:
        if self._folder is not None:
            (self._folder / f"{response_id}.json").unlink(missing_ok=True)

    def kept(self) -> list[tuple[str, str, Stored]]:
        """Return tenant, id and answer of each, for `restore` in another server."""
        return [(*key, stored) for key, stored in self._items.items()]

    def restore(self, kept: Any) -> None:
        """Take what another server has ``kept``."""
        for tenant, response_id, stored in msgspec.convert(kept, list[tuple[str, str, Stored]]):
            self._add((tenant, response_id), stored)

    def get(self, tenant: str, response_id: str) -> Stored | None:
        """Return an answer, which is then the most recently used, or None."""
        key = (tenant, response_id)
        stored = self._items.get(key)
        if stored is not None:
            self._items.move_to_end(key)
        return stored

    def item(self, tenant: str, item_id: str) -> dict[str, Any] | None:
        """Return the item of this id in the output of an answer, the newest answers first, or None."""
        for (owner, _), stored in reversed(self._items.items()):
            if owner == tenant and item_id.encode() in stored.response:
                output = msgspec.json.decode(stored.response)["output"]
                found = next((item for item in output if item.get("id") == item_id), None)
                if found is not None:
                    return dict(found)
        return None

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete an answer; return whether it was stored."""
        stored = self._items.pop((tenant, response_id), None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
            self._unlink(response_id)
        return stored is not None


@dataclass(slots=True, eq=False)
class Ticket:
    """One prompt on its way. Call `first` at its first token and `leave` at its end; later calls count for nothing."""

    _forecast: TtftForecast
    num_tokens: int
    is_long: bool
    predicted_s: float
    state: str = "waiting"  # then "decoding", then "gone"

    def first(self, measured_s: float) -> float:
        """The first token came ``measured_s`` after arrival. Return measured / predicted."""
        if self.state == "waiting":
            self.state = "decoding"
            self._forecast.started(self)
        return measured_s / self.predicted_s

    def leave(self) -> None:
        """The request is over, however it ended."""
        if self.state != "gone":
            self._forecast.left(self, waiting=self.state == "waiting")
            self.state = "gone"


class TtftForecast:
    """Counts the prompts ahead of a new one."""

    def __init__(self, slo: Slo, stats: Callable[[], EngineStats]) -> None:
        self.slo = slo
        self._stats = stats
        self._ahead = [0, 0]  # prompt tokens of requests without a token: of short prompts, and of long ones
        self._num_decoding = 0

    def enter(self, num_prompt_tokens: int) -> Ticket:
        """A request was sent to the engine; its ticket knows the prediction."""
        stats, (num_short, num_long) = self._stats().ttft, self._ahead
        busy = bool(self._num_decoding or num_short or num_long)
        predicted_s = stats.seconds(num_short, num_prompt_tokens, busy=busy, num_long=num_long)
        is_long = num_prompt_tokens > stats.long_tokens > 0
        self._ahead[is_long] += num_prompt_tokens
        return Ticket(self, num_prompt_tokens, is_long, predicted_s)

    def started(self, ticket: Ticket) -> None:
        self._ahead[ticket.is_long] -= ticket.num_tokens
        self._num_decoding += 1

    def left(self, ticket: Ticket, *, waiting: bool) -> None:
        if waiting:
            self._ahead[ticket.is_long] -= ticket.num_tokens
        else:
            self._num_decoding -= 1
