"""Probes, /version, /metrics, /v1/models; and what clients of other servers ask: the page at ``/``, vLLM's
``/tokenizer_info``, llama.cpp's ``/props`` and ``/slots``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from quire.api.job import served_name
from quire.api.state import ApiState
from quire.http.call import call_of
from quire.http.json_page import json_response
from quire.metrics.prometheus import Exposition

Handler = Callable[[Request], Awaitable[Response]]


class Probes:
    """GET endpoints that report the state of the server: ``starting`` → ``ready`` → ``draining`` or ``dead``.

    ``/livez`` tells of this process, ``/readyz`` of the engine, too: ``restarting``, ``hung`` or ``unsound``. The body
    of each probe is ``{"status": …}``; where the engine is at fault, with ``reason``, ``restarts`` and ``retry_in_s``.
    """

    def __init__(self, state: ApiState) -> None:
        self._state = state
        self._exposition = Exposition(state.metrics)

    async def livez(self, request: Request) -> Response:
        """200 until the engine is dead for good; 503 then, when only a restart of this process helps."""
        return self._status(self._state.frontend.state != "dead")

    async def startupz(self, request: Request) -> Response:
        """200 once the model is loaded."""
        return self._status(self._state.frontend.state in ("ready", "draining"))

    async def readyz(self, request: Request) -> Response:
        """200 if a new request would be computed at once; 503 while loading, draining, restarting, hung or dead."""
        frontend = self._state.frontend
        if frontend.state == "ready":
            health = frontend.health()
            if health.status != "ready":
                return json_response(
                    {
                        "status": health.status,
                        "reason": health.reason,
                        "restarts": health.num_restarts,
                        "retry_in_s": round(health.retry_in_s, 3),
                    },
                    503,
                )
        return self._status(frontend.state == "ready")

    async def health(self, request: Request) -> Response:
        """200 while the engine works, 503 otherwise (vLLM's probe)."""
        return self._status(self._state.frontend.state in ("ready", "draining"))

    async def answers(self) -> dict[str, Response]:
        """Return the answers now, for the process that gives them (`quire.http.front`)."""
        request = Request({"type": "http"})
        return {
            "/livez": await self.livez(request),
            "/readyz": await self.readyz(request),
            "/startupz": await self.startupz(request),
            "/health": await self.health(request),
        }

    async def version(self, request: Request) -> Response:
        """The version of Quire."""
        return json_response({"version": self._state.settings.version})

    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus's text form, or OpenMetrics."""
        body, content_type = self._exposition.page(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    def _status(self, good: bool) -> Response:
        return json_response({"status": self._state.frontend.state}, 200 if good else 503)


class Models:
    """``/v1/models`` and ``/v1/models/{id}``."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def listed(self, request: Request) -> Response:
        """The models and adapters served."""
        data = [self._card(name) for name in (*self._state.model.names, *self._state.adapter_names)]
        return json_response({"object": "list", "data": data})

    async def one(self, request: Request) -> Response:
        """One of them, or 404."""
        return json_response(self._card(served_name(self._state, request.path_params["model_id"])))

    def _card(self, name: str) -> dict[str, object]:
        """Return the entry of a name as vLLM does: an adapter's root is its path, its parent the model."""
        adapter, base = self._state.adapter_of(name), self._state.model.names[0]
        return {
            "id": name,
            "object": "model",
            "created": self._state.started_unix,
            "owned_by": "quire",
            "root": base if adapter is None else adapter.path,
            "parent": None if adapter is None else base,
            "max_model_len": self._state.model.max_model_len,
            "fingerprint": self._state.continuable_with(name),
        }


_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:42em;margin:3em auto;padding:0 1em}"
    "pre{background:#eee;padding:1em;white-space:pre-wrap}"
)
_LINKS = ("/v1/models", "/readyz", "/metrics", "/docs", "/openapi.json", "/props")


class About:
    """GET endpoints that describe the server and its model."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def page(self, request: Request) -> Response:
        """A page for people: name, model, state, a request to try; with keys set, the name alone."""
        parts = ["<h1>Quire</h1>"]
        settings = self._state.settings
        if not settings.api_keys and settings.key_file is None:
            model = self._state.model
            address = f"{request.url.scheme}://{request.url.netloc}"
            body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
            curl = f"curl {address}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
            links = " · ".join(f'<a href="{path}">{path}</a>' for path in _LINKS)
            parts += [
                f"<p>Version {escape(settings.version)}, {escape(self._state.frontend.state)}.</p>",
                f"<p>Model <b>{escape(', '.join(model.names))}</b>, a context of {model.max_model_len} tokens.</p>",
                f"<pre>{escape(curl)}</pre><p>{links}</p>",
            ]
        page = f"<!doctype html><html lang=en><meta charset=utf-8><title>Quire</title><style>{_STYLE}</style>"
        return HTMLResponse(page + "".join(parts))

    async def docs(self, request: Request) -> Response:
        """The description of this API as a page, which asks for a key where the server has keys."""
        return HTMLResponse((files("quire.api") / "docs.html").read_text())

    async def tokenizer_info(self, request: Request) -> Response:
        """The tokenizer's special tokens, the chat template and the sizes (vLLM's form)."""
        tokenizer, model = self._state.frontend.tokenizer, self._state.model
        return json_response(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **tokenizer.special.roles,
                "additional_special_tokens": list(tokenizer.special.additional),
                "chat_template": self._template(),
                "model_max_length": model.max_model_len,
                "vocab_size": model.vocab_size,
            }
        )

    async def props(self, request: Request) -> Response:
        """The model's properties (llama.cpp's form)."""
        model, special = self._state.model, self._state.frontend.tokenizer.special
        params = {**asdict(model.sampling()), "structured_outputs": None}
        return json_response(
            {
                "default_generation_settings": {"n_ctx": model.max_model_len, "params": params},
                "total_slots": max(1, len(self._state.running)),
                "model_path": model.names[0],
                "model_alias": model.names[0],
                "chat_template": self._template() or "",
                "bos_token": special.roles.get("bos_token", ""),
                "eos_token": special.roles.get("eos_token", ""),
                "modalities": {"vision": False, "audio": False},
                "build_info": f"quire-{self._state.settings.version}",
                "is_sleeping": False,
            }
        )

    async def slots(self, request: Request) -> Response:
        """The running requests, as slots (llama.cpp's form); one that is free if there are none.

        A key of the key file sees those of its tenant, unless it is an operator's.
        """
        key = call_of(request.scope).key
        owner = None if key is None or key.admin else key.tenant
        running = self._state.running.describe(self._state.now(), owner)
        return json_response([self._slot(i, one) for i, one in enumerate(running)] or [self._slot(0, None)])

    def _slot(self, index: int, running: dict[str, Any] | None) -> dict[str, Any]:
        about = running or {}
        return {
            "id": index,
            "n_ctx": self._state.model.max_model_len,
            "is_processing": running is not None,
            "id_task": about.get("id"),
            "n_prompt_tokens": about.get("prompt_tokens", 0),
            "next_token": {"n_decoded": about.get("completion_tokens", 0)},
        }

    def _template(self) -> str | None:
        template = self._state.frontend.chat_template
        return template.source() if template.names else None
