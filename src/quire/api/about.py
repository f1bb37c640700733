"""What clients of other servers ask of one: the page at ``/``, vLLM's ``/tokenizer_info``, llama.cpp's ``/props`` and
``/slots``."""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from quire.api.state import ApiState
from quire.http.body import json_response

_STYLE = (
    "body{font:16px/1.5 system-ui;max-width:42em;margin:3em auto;padding:0 1em}"
    "pre{background:#eee;padding:1em;overflow:auto}"
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
        """The running requests, as slots (llama.cpp's form); one that is free if there are none."""
        running = self._state.running.describe(self._state.now())
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
