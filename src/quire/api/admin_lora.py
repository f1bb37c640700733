"""LoRA adapters at run time, on the admin surface: load, unload, list; and vLLM's two routes for them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire.api.state import ApiState
from quire.engine.adapters import AdapterRegistry
from quire.errors import RequestError
from quire.http.body import json_response, read_json
from quire.http.wire import Boolean, Integer, Number, Text, Wire, parse
from quire.metrics.log import Log
from quire.request import Adapter

log = Log("admin")

UNLOAD_TIMEOUT_S = 30.0


class LoadAdapter(Wire):
    """Body of ``POST /lora`` and ``POST /v1/load_lora_adapter``."""

    lora_name: Text
    lora_path: Text
    load_inplace: Boolean = False


class UnloadAdapter(Wire):
    """Body of ``POST /v1/unload_lora_adapter``; ``lora_int_id`` is vLLM's own numbering, and says nothing here."""

    lora_name: Text
    lora_int_id: Integer | None = None
    timeout_s: Number = UNLOAD_TIMEOUT_S


class LoraAdmin:
    """The handlers. An adapter is read and checked before it is named; requests that use one end before it is gone."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        return [
            Route("/lora", self.listed, methods=["GET"]),
            Route("/lora", self.load, methods=["POST"]),
            Route("/lora/{lora_name:path}", self.unload, methods=["DELETE"]),
            Route("/v1/load_lora_adapter", self.load_as_vllm, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_as_vllm, methods=["POST"]),
        ]

    async def listed(self, request: Request) -> Response:
        """The adapters that requests may name."""
        return json_response(
            {"object": "list", "data": [_card(each) for each in self._registry.adapters.values()]}
        )

    async def load(self, request: Request) -> Response:
        """Serve one more adapter.

        Raises:
            RequestError: names the field, and the file and tensor where the adapter is at fault.
        """
        return json_response(_card(await self._load(await self._body(request))))

    async def load_as_vllm(self, request: Request) -> Response:
        """As `load`, with vLLM's answer."""
        adapter = await self._load(await self._body(request))
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Refuse new requests with an adapter, and answer when those that have it are at their end, or time is up.

        Raises:
            NotFoundError: there is no such adapter; lists those that are loaded.
        """
        adapter, left = await self._unload(request.path_params["lora_name"], _seconds(request))
        return json_response(
            {**_card(adapter), "status": "draining" if left else "unloaded", "num_requests": left}
        )

    async def unload_as_vllm(self, request: Request) -> Response:
        """As `unload`, with vLLM's answer."""
        asked = parse(UnloadAdapter, await self._body(request))
        adapter, left = await self._unload(asked.lora_name, asked.timeout_s)
        still = f" {left} requests still run with it." if left else ""
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' removed successfully.{still}")

    async def _load(self, body: Any) -> Adapter:
        asked = parse(LoadAdapter, body)
        registry = self._registry
        # Reads and hashes the file, or downloads it: not in the loop's thread.
        adapter = await asyncio.to_thread(registry.read, asked.lora_name, asked.lora_path)
        registry.add(adapter, replace=asked.load_inplace)
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

    async def _body(self, request: Request) -> Any:
        return await read_json(request.scope, request.receive, self._state.settings.max_body_bytes)


def _seconds(request: Request) -> float:
    text = request.query_params.get("timeout_s", str(UNLOAD_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise RequestError(
            f"timeout_s = {text!r} is not allowed: it must be a number in 0…86400.", param="timeout_s"
        )
    return seconds


def _card(adapter: Adapter) -> dict[str, Any]:
    return {
        "id": adapter.name,
        "object": "lora_adapter",
        "path": adapter.path,
        "rank": adapter.rank,
        "content": adapter.key,
    }
