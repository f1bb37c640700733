"""Ollama's GET endpoints and ``/api/show``: the served model as Ollama's clients list it. It is always loaded."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.job import served_name
from quire.api.state import ApiState
from quire.http.body import read_json
from quire.http.call import Call
from quire.http.json_page import json_response
from quire.http.refusals import LATEST, OLLAMA_VERSION, HttpError, Refusal
from quire.http.wire import Text, Wire, parse
from quire.text.infill import find_infill

_NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))
# What would change the models on disk → what to do instead.
_INSTEAD = {
    "pull": "Download with `quire pull ORG/REPO`, and serve it with `quire serve ORG/REPO`",
    "push": "Quire publishes no models",
    "create": "Start the server with --chat-template, --quantize or --lora, and name the result with "
    "--served-model-name",
    "copy": "Give the model several names with --served-model-name A,B",
    "delete": "Delete models from the cache of the hub with `quire rm ORG/REPO`",
    "blobs": "Start the server with the file: `quire serve FILE.gguf`",
}


class ShowRequest(Wire):
    """Body of ``/api/show``."""

    model: Text | None = None


class OllamaModels:
    """The handlers."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def tags(self, request: Request) -> Response:
        """The served names and adapters (Ollama's form)."""
        return json_response({"models": [self._listed(name) for name in self._names()]})

    async def ps(self, request: Request) -> Response:
        """The loaded models, which are the served ones (Ollama's form)."""
        size = self._num_bytes()
        loaded = {"expires_at": _NEVER, "size_vram": 0, "context_length": self._state.model.max_model_len}
        return json_response({"models": [self._listed(n) | {"size": size, **loaded} for n in self._names()]})

    async def version(self, request: Request) -> Response:
        """The version of Ollama's API that this one follows, and Quire's."""
        return json_response({"version": OLLAMA_VERSION, "quire": self._state.settings.version})

    async def manage(self, request: Request) -> Response:
        """Refuse what changes the models on disk; a pull of a model that is served has nothing to do."""
        verb = request.url.path.split("/")[2]
        if verb == "pull":
            body = await read_json(request.scope, request.receive, self._state.settings.max_body_bytes)
            name = body.get("model", body.get("name")) if isinstance(body, dict) else None
            if isinstance(name, str) and name.removesuffix(LATEST) in self._served():
                return json_response({"status": "success"})
        served = ", ".join(self._served())
        text = f"{request.method} {request.url.path} is not supported: this server serves {served}. {_INSTEAD[verb]}."
        raise HttpError(Refusal(501, text, code="unsupported"))

    def show(self, body: Any, ignored: list[str] | None) -> dict[str, Any]:
        """Return what is known of one model."""
        state, config = self._state, self._state.settings.model
        name = served_name(state, parse(ShowRequest, body, ignored=ignored).model)
        template = state.frontend.chat_template
        defaults = state.model.generation_defaults
        family = config.spec.family if config is not None else "unknown"
        info: dict[str, Any] = {
            "general.architecture": family,
            f"{family}.context_length": state.model.max_model_len,
            f"{family}.vocab_size": state.model.vocab_size,
        }
        if config is not None:
            spec, attention = config.spec, config.spec.attentions[0]
            info["general.parameter_count"] = spec.num_params
            info[f"{family}.block_count"] = spec.num_layers
            info[f"{family}.embedding_length"] = spec.hidden_size
            info[f"{family}.attention.head_count"] = attention.num_heads
            info[f"{family}.attention.head_count_kv"] = attention.num_kv_heads
        return {
            "license": "",
            "modelfile": f"# Served by Quire.\nFROM {config.name if config is not None else name}\n",
            "parameters": "\n".join(f"{key:<30} {value}" for key, value in sorted(defaults.items())),
            "template": template.source() if template.names else "{{ .Prompt }}",
            "details": self._details(),
            "model_info": info,
            "capabilities": self._capabilities(),
            "modified_at": self._modified(),
        }

    def _capabilities(self) -> list[str]:
        with_tools, plain = self._state.output_format(True), self._state.output_format(False)
        has_by_name = {
            "completion": True,
            "insert": find_infill(self._state.frontend.tokenizer) is not None,
            "tools": with_tools.calls_tools,
            "thinking": plain.reasons,
        }
        return [name for name, has in has_by_name.items() if has]

    def _served(self) -> tuple[str, ...]:
        return (*self._state.model.names, *self._state.adapter_names)

    def _names(self) -> list[str]:
        """Ollama shows the tag of every name."""
        return [name if ":" in name.rpartition("/")[2] else name + LATEST for name in self._served()]

    def _listed(self, name: str) -> dict[str, Any]:
        scope = f"{name} {self._state.settings.system_fingerprint}"
        return {
            "name": name,
            "model": name,
            "modified_at": self._modified(),
            "size": self._num_bytes(),
            "digest": hashlib.sha256(scope.encode()).hexdigest(),
            "details": self._details(),
        }

    def _details(self) -> dict[str, Any]:
        config = self._state.settings.model
        details: dict[str, Any] = {"parent_model": "", "format": "", "family": "", "families": []}
        if config is None:
            return {**details, "parameter_size": "", "quantization_level": ""}
        family, kinds = config.spec.family, {form.kind for form in config.formats.values() if form.quantized}
        return {
            **details,
            "format": "gguf" if config.path.endswith(".gguf") else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": _short(config.spec.num_params),
            "quantization_level": "+".join(sorted(kinds)).upper() or _DTYPES[config.dtype],
        }

    def _num_bytes(self) -> int:
        config = self._state.settings.model
        return 0 if config is None else config.spec.weight_bytes(config.dtype, config.formats)

    def _modified(self) -> str:
        config = self._state.settings.model
        path = Path(config.path) if config is not None else Path()
        seconds = path.stat().st_mtime if path.exists() else self._state.started_unix
        return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def _short(count: int) -> str:
    """Return a number of parameters as Ollama writes it: 7.6B."""
    unit, letter = next(((unit, letter) for unit, letter in _UNITS if count >= unit), (1, ""))
    return f"{count / unit:.1f}{letter}"


async def show(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> dict[str, Any]:
    """Return what is known of one model.

    Raises:
        NotFoundError: the model is not served.
    """
    return OllamaModels(state).show(body, ignored)
