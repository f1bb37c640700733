"""``/openapi.json``: the description of this API, made from the wire models and field tables that check its requests.

Names without effect are described as such; refused names are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api import protocol as wire
from quire.api.anthropic_request import CountTokensRequest, MessagesRequest, Turn
from quire.api.chat_messages import Message
from quire.api.ollama import EmbeddingsRequest, EmbedRequest
from quire.api.ollama_models import ShowRequest
from quire.api.ollama_request import OllamaChatRequest, OllamaGenerateRequest, OllamaMessage, Options
from quire.api.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from quire.api.response_request import ResponsesRequest
from quire.api.text_tools import DetokenizeRequest, TokenizeRequest
from quire.http.refusals import ANTHROPIC_ROOT, OLLAMA_ROOT
from quire.http.wire import Body, Use, Wire, table_of

_REF = "#/components/schemas/{model}"


_CHAT_PARTS = {"messages": Message}
_STREAM = {"stream_options": wire.StreamOptions}
BODIES: dict[str, Body] = {
    "/v1/chat/completions": Body("Answer a conversation", wire.ChatRequest, _CHAT_PARTS, _STREAM),
    "/v1/completions": Body("Continue a text", wire.CompletionRequest, {}, _STREAM, ("prompt",)),
    "/v1/messages": Body("Answer a conversation (Anthropic's form)", MessagesRequest, {"messages": Turn}),
    "/v1/messages/count_tokens": Body(
        "Count the tokens of a conversation", CountTokensRequest, {"messages": Turn}
    ),
    "/v1/responses": Body("Answer, and keep the answer", ResponsesRequest),
    "/v1/responses/input_tokens": Body("Count the tokens of a response's input", ResponsesRequest),
    "/v1/embeddings": Body("Vectors of texts", EmbeddingRequest, required=("input",)),
    **dict.fromkeys(
        ("/v1/rerank", "/rerank", "/v2/rerank"),
        Body("Documents by how well they answer a query", RerankRequest),
    ),
    **dict.fromkeys(("/v1/score", "/score"), Body("How well texts answer texts", ScoreRequest)),
    "/v1/chat/completions/render": Body(
        "The prompt of a conversation, as text and ids", wire.ChatRequest, _CHAT_PARTS, _STREAM
    ),
    "/api/chat": Body(
        "Answer a conversation (Ollama's form)",
        OllamaChatRequest,
        {"messages": OllamaMessage},
        {"options": Options},
    ),
    "/api/generate": Body("Continue a text (Ollama's form)", OllamaGenerateRequest, {}, {"options": Options}),
    "/api/embed": Body("Vectors of texts (Ollama's form)", EmbedRequest),
    "/api/embeddings": Body("The vector of a text (Ollama's older form)", EmbeddingsRequest),
    "/api/show": Body("What is known of a model (Ollama's form)", ShowRequest),
    "/tokenize": Body("Text or messages to token ids", TokenizeRequest, _CHAT_PARTS),
    "/detokenize": Body("Token ids to text", DetokenizeRequest),
}


class Description:
    """``/openapi.json`` of ``routes``; made at the first request for it, so that it does not delay the start."""

    def __init__(self, routes: Sequence[Route], bodies: Mapping[str, Body], version: str) -> None:
        """``bodies``: those of the routes that are not the API's own."""
        self._routes = routes
        self._bodies = {**BODIES, **bodies}
        self._version = version
        self._body: bytes | None = None

    async def show(self, request: Request) -> Response:
        """The description of this API."""
        if self._body is None:
            self._body = msgspec.json.encode(openapi_of(self._routes, self._bodies, self._version))
        return Response(self._body, media_type="application/json")


def openapi_of(routes: Iterable[Route], bodies: Mapping[str, Body], version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of ``routes``; routes that are not in ``bodies`` by their handlers."""
    schemas: dict[str, Any] = {
        "Error": _ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
        "OllamaError": _OLLAMA_ERROR,
    }
    paths: dict[str, Any] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        operations = paths.setdefault(path, {})
        for method in sorted((route.methods or set()) - {"HEAD"}):
            body = bodies.get(path) if method == "POST" else None
            operations[method.lower()] = _operation(route, body, path, method, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(
    route: Route, body: Body | None, path: str, method: str, schemas: dict[str, Any]
) -> dict[str, Any]:
    error = "AnthropicError" if path.startswith(ANTHROPIC_ROOT) else "Error"
    error = "OllamaError" if path.startswith(OLLAMA_ROOT) else error
    docstring = (inspect.getdoc(route.endpoint) or "").partition("\n")[0]
    operation: dict[str, Any] = {
        "summary": docstring if body is None else body.summary,
        "operationId": f"{method.lower()}{path}".replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {
            "200": {"description": "the answer"},
            "default": {
                "description": "a refusal, or a failure",
                "content": {"application/json": {"schema": {"$ref": _REF.format(model=error)}}},
            },
        },
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if body is not None:
        schema = _schema(body, schemas)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _schema(body: Body, schemas: dict[str, Any]) -> dict[str, Any]:
    """Add the body's schema and the schemas that it refers to; return the reference to it."""
    reference = _add(body.model, schemas)
    own = schemas[body.model.__name__]
    properties = own["properties"]
    if body.required:
        own["required"] = sorted({*own.get("required", ()), *body.required})
    for name, part in body.lists.items():
        properties[name] = {**properties[name], "items": _add(part, schemas)}
        if properties[name].pop("anyOf", None) is not None:  # an optional list: null is the same as absent
            properties[name]["type"] = "array"
            del properties[name]["default"]
    for name, part in body.objects.items():
        properties[name] = {"anyOf": [_add(part, schemas), {"type": "null"}]}
    for name, rule in table_of(body.model).items():
        if rule.use is Use.NO_EFFECT:
            properties.setdefault(name, {"description": "accepted; no effect here"})
        elif rule.use is Use.MAPPED:
            properties.setdefault(name, {"description": f"another name of {rule.used_as}"})
    return reference


def _add(model: type[Wire], schemas: dict[str, Any]) -> dict[str, Any]:
    if model.__name__ not in schemas:
        schema = model.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
    return {"$ref": _REF.format(model=model.__name__)}


def _error_schema(*names: str) -> dict[str, Any]:
    properties = {name: {"type": ["string", "null"]} for name in names}
    return {"type": "object", "required": list(names), "properties": properties}


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": _error_schema("message", "type", "param", "code")},
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, "error": _error_schema("type", "message")},
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
