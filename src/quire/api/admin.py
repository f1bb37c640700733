"""The admin surface: cancel, drain, reset of the prefix cache, live settings, adapters. On a port or socket of its own.

It is an app beside that of `create_app` and shares its state. Browsers are refused, so that a web page cannot control a
server on its reader's machine.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire.api.health import Handler, Probes
from quire.api.state import ApiState
from quire.args import ServerArgs, defaults
from quire.config import AUTO_DRAFTS, MAX_DRAFTS
from quire.engine.adapters import AdapterRegistry
from quire.engine.messages import ChangePolicy, Reply, ResetPrefixCache, SaveRecording
from quire.errors import CapacityError, ConfigError, NotFoundError, RequestError, clip
from quire.executor.profile_control import TakeProfile
from quire.http.body import read_json
from quire.http.browser_guard import NoBrowsers
from quire.http.edge import Edge
from quire.http.json_page import json_response
from quire.http.router_errors import error_handlers
from quire.http.wire import Boolean, Int64, Integer, Number, Text, Wire, not_allowed, parse
from quire.metrics.log import Log
from quire.request import Adapter
from quire.scheduler.settings import PolicyChange

UNLOAD_TIMEOUT_S: float = defaults(ServerArgs)["drain_timeout_s"]
log = Log("admin")


class RuntimePatch(Wire):
    """Body of ``PATCH /runtime``: the names of the flags."""

    gate: Literal["static", "dynamic", "continuous"] | None = None
    order: Literal["fcfs", "priority", "shortest-first", "longest-prefix", "deadline"] | None = None
    max_num_seqs: Int64 | None = None
    max_num_batched_tokens: Int64 | None = None
    long_prefill_token_threshold: Int64 | None = None
    max_queue: Int64 | None = None
    dynamic_max_wait_ms: Number | None = None
    spec_tokens: Annotated[
        Literal["auto"] | Int64 | None, Field(description=f"'auto' or an integer in 0…{MAX_DRAFTS}")
    ] = None
    spec_tree: Int64 | None = None
    # Settings that return to the controller of --slo.
    release: list[Literal["max_num_seqs", "max_num_batched_tokens"]] | None = None


class ProfileBody(Wire):
    """Body of ``POST /start_profile``."""

    num_steps: Int64 | None = None


RUNTIME = tuple(name for name in RuntimePatch.model_fields if name != "release")


def create_admin_app(
    main: Starlette, *, keys: tuple[str, ...] = (), hosts: tuple[str, ...] | None = None
) -> Starlette:
    """Return the admin app over the state of ``main`` (what `create_app` returned). Without ``keys`` it is open.

    ``hosts``: names under which it may be called, see `BrowserRules`.
    """
    state: ApiState = main.state.quire
    app = Starlette(
        routes=_routes(state),
        middleware=[
            Middleware(NoBrowsers, hosts=hosts),
            Middleware(Edge, api_keys=keys, new_id=state.new_id),
        ],
        exception_handlers=error_handlers(lambda status: state.metrics.response("other", status)),
    )
    app.router.redirect_slashes = False
    return app


def _routes(state: ApiState) -> list[Route]:
    admin, lora, probes = Admin(state), LoraAdmin(state), Probes(state)
    table: tuple[tuple[str, str, Handler], ...] = (
        ("GET", "/livez", probes.livez),
        ("GET", "/readyz", probes.readyz),
        ("GET", "/metrics", probes.metrics),
        ("GET", "/runtime", admin.runtime),
        ("PATCH", "/runtime", admin.change_runtime),
        ("GET", "/drain", admin.progress),
        ("POST", "/drain", admin.drain),
        ("POST", "/undrain", admin.undrain),
        ("POST", "/reset_prefix_cache", admin.reset_prefix_cache),
        ("POST", "/recording", admin.record),
        ("POST", "/start_profile", admin.start_profile),
        ("POST", "/stop_profile", admin.stop_profile),
        ("GET", "/requests", admin.requests),
        ("POST", "/requests/{request_id:path}/cancel", admin.cancel),
        ("GET", "/lora", lora.listed),
        ("POST", "/lora", lora.load),
        ("DELETE", "/lora/{lora_name:path}", lora.unload),
        ("POST", "/v1/load_lora_adapter", lora.load_as_vllm),
        ("POST", "/v1/unload_lora_adapter", lora.unload_as_vllm),
    )
    return [Route(path, handler, methods=[method]) for method, path, handler in table]


class LoadAdapter(Wire):
    """Body of ``POST /lora`` and ``POST /v1/load_lora_adapter``."""

    lora_name: Text
    lora_path: Text
    load_inplace: Boolean = False


class UnloadAdapter(Wire):
    """Body of ``POST /v1/unload_lora_adapter``; ``lora_int_id``, vLLM's own numbering, is ignored."""

    lora_name: Text
    lora_int_id: Integer | None = None
    timeout_s: Number = UNLOAD_TIMEOUT_S


class Admin:
    """The handlers of settings, drain, cache and requests."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def runtime(self, request: Request) -> Response:
        """The settings in force."""
        reply = await self._state.frontend.call(lambda call_id: ChangePolicy(call_id, PolicyChange()))
        return json_response({"object": "runtime", "runtime": _as_flags(reply.values), **_pinned(reply)})

    async def change_runtime(self, request: Request) -> Response:
        """Change settings at the next step boundary; the answer has the old and new values of the given settings.

        Raises:
            RequestError: names the setting, the value and what is allowed; no setting was changed.
        """
        body = await _body(self._state, request)
        settings = parse(RuntimePatch, body).model_dump(exclude_none=True)
        if not settings:
            raise RequestError(f"The body changes nothing: send one or more of {', '.join(RUNTIME)}.")
        wait_ms, release = settings.pop("dynamic_max_wait_ms", None), tuple(settings.pop("release", ()))
        if both := [name for name in release if name in settings]:
            raise RequestError(f"{both[0]} is both set and released: send one of them.", param="release")
        drafts = _drafts(settings.pop("spec_tokens", None), settings.pop("spec_tree", None))
        change = PolicyChange(
            **settings, **drafts, dynamic_max_wait_s=None if wait_ms is None else wait_ms / 1e3
        )
        try:
            reply = await self._state.frontend.call(lambda call_id: ChangePolicy(call_id, change, release))
        except ConfigError as error:
            raise _as_request_error(error, wait_ms) from None
        old, new = _as_flags(reply.before), _as_flags(reply.values)
        changes = {name: {"old": old[name], "new": new[name]} for name in RUNTIME if name in body}
        log.info("runtime_changed", **{name: f"{c['old']} -> {c['new']}" for name, c in changes.items()})
        return json_response({"object": "runtime", "changed": changes, "runtime": new, **_pinned(reply)})

    async def progress(self, request: Request) -> Response:
        """The progress of a drain, or that there is none."""
        return json_response(self._progress())

    async def drain(self, request: Request) -> Response:
        """Refuse new requests from now on; those in flight and in the queue run to their end."""
        self._state.frontend.stop_admitting()
        log.info("drain", requests=len(self._state.running))
        return json_response(self._progress())

    async def undrain(self, request: Request) -> Response:
        """Accept requests again.

        Raises:
            CapacityError: the process is about to end, or its engine is dead.
        """
        if not self._state.frontend.admit_again():
            raise CapacityError(
                f"The server is {self._state.frontend.state} for good: it can take no more requests.",
                retryable=True,
            )
        log.info("undrain")
        return json_response(self._progress())

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Drop cached prefixes; running requests keep their blocks."""
        reply = await self._state.frontend.call(ResetPrefixCache)
        return json_response({"object": "prefix_cache.reset", **reply.values})

    async def record(self, request: Request) -> Response:
        """Save what the flight recorder has.

        Raises:
            RequestError: it is off, or the file cannot be written.
        """
        try:
            reply = await self._state.frontend.call(SaveRecording)
        except ConfigError as error:
            raise RequestError(str(error)) from None
        return json_response({"object": "recording", **reply.values})

    async def start_profile(self, request: Request) -> Response:
        """Profile the next steps; ``num_steps`` of a JSON body ends it after so many. Raises RequestError."""
        has_body = request.headers.get("content-length", "0") != "0"
        profile = parse(ProfileBody, await _body(self._state, request)) if has_body else ProfileBody()
        if profile.num_steps is not None and not 1 <= profile.num_steps <= 1000:
            raise not_allowed("num_steps", profile.num_steps, "an integer of 1 to 1000")
        return await self._profile(start=True, num_steps=profile.num_steps)

    async def stop_profile(self, request: Request) -> Response:
        """End the profile: the trace's path, and the ops that took longest. Raises RequestError."""
        return await self._profile(start=False, num_steps=None)

    async def _profile(self, *, start: bool, num_steps: int | None) -> Response:
        try:
            reply = await self._state.frontend.call(lambda call_id: TakeProfile(call_id, start, num_steps))
        except ConfigError as error:
            raise RequestError(str(error)) from None
        return json_response({"object": "profile", **reply.values})

    async def requests(self, request: Request) -> Response:
        """The running requests, in order of arrival."""
        return json_response({"object": "list", "data": self._state.running.describe(self._state.now())})

    async def cancel(self, request: Request) -> Response:
        """End every request of this id; their clients get an error.

        Raises:
            NotFoundError: no running request has this id.
        """
        request_id = request.path_params["request_id"]
        requests = self._state.running.named(request_id)
        if not requests:
            raise NotFoundError(
                f"No running request has the id {clip(request_id)} (the id of its answer, or its x-request-id): it has "
                "ended, or never existed. GET /requests lists those that run.",
                param="request_id",
                code="request_not_found",
            )
        for one in requests:
            await one.cancel()
        return json_response({"id": request_id, "object": "request.cancelled", "cancelled": len(requests)})

    def _progress(self) -> dict[str, Any]:
        frontend = self._state.frontend
        stats = frontend.stats()
        return {
            "object": "drain",
            "state": frontend.state,
            "drained": frontend.state == "draining" and frontend.num_requests == 0,
            "num_requests": frontend.num_requests,  # in flight, counted by this process
            "num_running": stats.num_running,  # sequences, from the engine's last report
            "num_waiting": stats.num_waiting,
        }


async def _body(state: ApiState, request: Request) -> Any:
    return await read_json(request.scope, request.receive, state.settings.max_body_bytes)


def _drafts(spec_tokens: int | str | None, spec_tree: int | None) -> dict[str, Any]:
    """Return what a `PolicyChange` has for the two settings."""
    tree = {} if spec_tree is None else {"max_draft_paths": spec_tree}
    if spec_tokens is None:
        return tree
    is_auto = spec_tokens == "auto"
    return {"max_num_drafts": AUTO_DRAFTS if is_auto else spec_tokens, "adaptive_drafts": is_auto, **tree}


def _as_flags(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings under the names of their flags."""
    values = {**settings, "dynamic_max_wait_ms": round(settings["dynamic_max_wait_s"] * 1e3, 6)}
    values["spec_tokens"] = (
        "auto" if settings["adaptive_drafts"] and settings["max_num_drafts"] else settings["max_num_drafts"]
    )
    values["spec_tree"] = settings["max_draft_paths"]
    return {name: values[name] for name in RUNTIME}


def _pinned(reply: Reply) -> dict[str, Any]:
    """Return, with ``--slo``, the settings of its controller that an operator has set."""
    return {} if reply.pinned is None else {"pinned": list(reply.pinned)}


def _as_request_error(error: ConfigError, wait_ms: float | None) -> RequestError:
    if error.param == "dynamic_max_wait_s":
        return not_allowed("dynamic_max_wait_ms", wait_ms, "a number ≥ 0")
    return RequestError(str(error), param=error.param)


class LoraAdmin:
    """The handlers of adapters, which are checked before requests can name them and unloaded after those have ended."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def listed(self, request: Request) -> Response:
        """The adapters that requests may name."""
        cards = [_adapter_card(adapter) for adapter in self._registry.adapters.values()]
        return json_response({"object": "list", "data": cards})

    async def load(self, request: Request) -> Response:
        """Load an adapter.

        Raises:
            RequestError: names the field, or the file and tensor that are wrong.
        """
        return json_response(_adapter_card(await self._load(await _body(self._state, request))))

    async def load_as_vllm(self, request: Request) -> Response:
        """As `load`, with vLLM's answer."""
        adapter = await self._load(await _body(self._state, request))
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Refuse new requests with an adapter; answer when its last request has ended, or after ``timeout_s``.

        Raises:
            NotFoundError: the adapter is not loaded; lists those that are.
        """
        adapter, left = await self._unload(request.path_params["lora_name"], _seconds(request))
        return json_response(
            {**_adapter_card(adapter), "status": "draining" if left else "unloaded", "num_requests": left}
        )

    async def unload_as_vllm(self, request: Request) -> Response:
        """As `unload`, with vLLM's answer."""
        body = parse(UnloadAdapter, await _body(self._state, request))
        adapter, left = await self._unload(body.lora_name, body.timeout_s)
        still = f" {left} requests still run with it." if left else ""
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' removed successfully.{still}")

    async def _load(self, body: Any) -> Adapter:
        fields = parse(LoadAdapter, body)
        registry = self._registry
        # Reads and hashes the file, or downloads it, so it must not run in the loop's thread.
        adapter = await asyncio.to_thread(registry.read, fields.lora_name, fields.lora_path)
        registry.add(adapter, replace=fields.load_inplace)
        log.info("adapter_loaded", name=adapter.name, path=adapter.path, rank=adapter.rank)
        return adapter

    async def _unload(self, name: str, timeout_s: float) -> tuple[Adapter, int]:
        adapter = self._registry.remove(name)
        left = await self._state.frontend.streams.wait_for_adapter(adapter, timeout_s)
        log.info("adapter_unloaded", name=name, requests_left=left)
        return adapter, left

    @property
    def _registry(self) -> AdapterRegistry:
        registry = self._state.frontend.adapters
        if registry is None:
            raise RequestError("This engine runs no adapters.")
        return registry


def _seconds(request: Request) -> float:
    text = request.query_params.get("timeout_s", str(UNLOAD_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise not_allowed("timeout_s", text, "a number in 0…86400")
    return seconds


def _adapter_card(adapter: Adapter) -> dict[str, Any]:
    return {
        "id": adapter.name,
        "object": "lora_adapter",
        "path": adapter.path,
        "rank": adapter.rank,
        "content": adapter.key,
    }
