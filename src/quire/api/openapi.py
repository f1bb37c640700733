"""``/openapi.json``: the description of this API, made from the wire models and field tables that check its requests.

Names without effect are described as such; refused names and routes outside of the schema are left out.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.described import HOLDS, JSON_SCHEMA, ONE_OF, REFUSED, component
from quire.api.dialects.anthropic.request import CountTokensRequest, MessagesRequest
from quire.api.dialects.native.fields import InfillRequest, TgiRequest
from quire.api.dialects.ollama.models import ShowRequest
from quire.api.dialects.ollama.request import (
    EmbeddingsRequest,
    EmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from quire.api.dialects.openai import fields as openai
from quire.api.dialects.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from quire.api.dialects.openai.text_tools import DetokenizeRequest, TokenizeRequest
from quire.api.dialects.responses.request import ResponsesRequest
from quire.api.dialects.tei import endpoints as tei
from quire.api.late import LateHandler
from quire.http.field_rules import Use, field_table
from quire.http.refusals import ANTHROPIC_ROOT, OLLAMA_ROOT
from quire.http.wire import Body, Wire
from quire.request import RANGES

BODIES: dict[str, Body] = {
    "/v1/chat/completions": Body("Answer a conversation", openai.ChatRequest),
    "/v1/completions": Body("Continue a text", openai.CompletionRequest, ("prompt",)),
    "/v1/messages": Body("Answer a conversation (Anthropic's form)", MessagesRequest),
    "/v1/messages/count_tokens": Body("Count the tokens of a conversation", CountTokensRequest),
    "/v1/responses": Body("Answer, and keep the answer", ResponsesRequest),
    "/v1/responses/input_tokens": Body("Count the tokens of a response's input", ResponsesRequest),
    "/v1/embeddings": Body("Vectors of texts", EmbeddingRequest, ("input",)),
    **dict.fromkeys(
        ("/v1/rerank", "/rerank", "/v2/rerank"),
        Body("Documents by how well they answer a query", RerankRequest),
    ),
    **dict.fromkeys(("/v1/score", "/score"), Body("How well texts answer texts", ScoreRequest)),
    "/v1/chat/completions/render": Body("The prompt of a conversation, as text and ids", openai.ChatRequest),
    "/api/chat": Body("Answer a conversation (Ollama's form)", OllamaChatRequest),
    "/api/generate": Body("Continue a text (Ollama's form)", OllamaGenerateRequest),
    "/api/embed": Body("Vectors of texts (Ollama's form)", EmbedRequest),
    "/api/embeddings": Body("The vector of a text (Ollama's older form)", EmbeddingsRequest),
    "/api/show": Body("What is known of a model (Ollama's form)", ShowRequest),
    "/completion": Body("Continue a text (llama.cpp's form)", openai.CompletionRequest, ("prompt",)),
    "/infill": Body("The text between two others (llama.cpp's form)", InfillRequest),
    "/generate": Body("Continue a text (TGI's form)", TgiRequest, ("inputs",)),
    "/generate_stream": Body("Continue a text, in events (TGI's form)", TgiRequest, ("inputs",)),
    "/": Body("Vectors, or what else the model gives (TEI's form)", tei.TeiEmbedRequest, ("inputs",)),
    "/embed": Body("Vectors of texts (TEI's form)", tei.TeiEmbedRequest, ("inputs",)),
    "/embed_all": Body("A row per token of texts (TEI's form)", tei.TokenRowsRequest),
    "/embed_sparse": Body("A weight per token of the vocabulary (TEI's form)", tei.TokenRowsRequest),
    "/predict": Body("Labels of texts or pairs (TEI's form)", tei.PredictRequest, ("inputs",)),
    "/similarity": Body("Cosines of a text and others (TEI's form)", tei.SimilarityRequest),
    "/classify": Body("Labels of texts", tei.ClassifyRequest),
    "/v2/embed": Body("Vectors of texts (Cohere's form)", tei.CohereEmbedRequest),
    "/tokenize": Body("Text or messages to token ids", TokenizeRequest),
    "/detokenize": Body("Token ids to text", DetokenizeRequest),
}


@dataclass(frozen=True, slots=True)
class Served:
    """What the description says of the model."""

    names: tuple[str, ...]  # names of the model and its adapters
    vocab_size: int
    max_model_len: int
    hidden_size: int | None = None
    fills_in: bool = True  # whether it was trained to fill in the middle of a text


class Description:
    """``/openapi.json`` of ``routes``; made at a request for it, so that it does not delay the start."""

    def __init__(
        self,
        routes: Sequence[Route],
        bodies: Mapping[str, Body],
        version: str,
        served: Callable[[], tuple[Any, ...]],
    ) -> None:
        """``bodies``: those of the routes that are not the API's own."""
        self._routes = routes
        self._bodies = {**BODIES, **bodies}
        self._version = version
        self._served = served
        self._made: tuple[Served, bytes] | None = None

    async def show(self, request: Request) -> Response:
        """The description of this API."""
        served = Served(*self._served())
        if self._made is None or self._made[0] != served:  # adapters come and go
            described = describe_api(self._routes, self._bodies, self._version, served)
            self._made = served, msgspec.json.encode(described)
        return Response(self._made[1], media_type="application/json")


def describe_api(
    routes: Iterable[Route], bodies: Mapping[str, Body], version: str, served: Served
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of ``routes``; routes that are not in ``bodies`` by their handlers."""
    schemas = _of_model(served) | {
        "Error": _ERROR,
        "AnthropicError": _ANTHROPIC_ERROR,
        "OllamaError": _OLLAMA_ERROR,
    }
    paths: dict[str, Any] = {}
    for route in (entry for entry in routes if entry.include_in_schema):
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
    late = getattr(route.endpoint, "__self__", None)
    handler = late.load() if isinstance(late, LateHandler) else route.endpoint
    docstring = (inspect.getdoc(handler) or "").partition("\n")[0]
    operation: dict[str, Any] = {
        "summary": docstring if body is None else body.summary,
        "operationId": f"{method.lower()}{path}".replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {
            "200": {"description": "the answer"},
            "default": {
                "description": "a refusal, or a failure",
                "content": {"application/json": {"schema": component(error)}},
            },
        },
    }
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _IDS.get(name, {"type": "string"})}
            for name in names
        ]
    if body is not None:
        schema = _schema(body, schemas)
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _schema(body: Body, schemas: dict[str, Any]) -> dict[str, Any]:
    """Add the body's schema and the schemas that it refers to; return the reference to it."""
    reference = _add(body.model, schemas)
    own = schemas[body.model.__name__]
    if body.required:
        own["required"] = sorted({*own.get("required", ()), *body.required})
    for name, schema in body.holds.items():
        own["properties"][name] = _with_own_words(own["properties"][name], _resolved(schema, schemas))
    return reference


def _add(model: type[Wire], schemas: dict[str, Any]) -> dict[str, Any]:
    """Add the schema of a model: its fields, what they hold, and what is refused of them beside each other."""
    reference = component(model.__name__)
    if model.__name__ in schemas:
        return reference
    own = schemas[model.__name__] = model.model_json_schema(ref_template=component("{model}")["$ref"])
    properties = own["properties"]
    context = schemas["MaxTokens"]["maximum"]
    for name, schema in properties.items():
        _add_bounds(name, schema, context)
        schema_held = next((HOLDS[base, name] for base in model.__mro__ if (base, name) in HOLDS), None)
        if schema_held is not None:
            properties[name] = _with_own_words(schema, _resolved(schema_held, schemas))
    for name, rule in field_table(model).items():
        if rule.use is Use.NO_EFFECT:
            properties.setdefault(name, {"description": "accepted; no effect here"})
        elif rule.use is Use.MAPPED and rule.used_as in properties:
            properties[rule.used_as].setdefault("x-other-names", []).append(name)
    branches = _resolved(ONE_OF.get(model, []), schemas)
    if branches:
        own["anyOf"] = branches
    refused = [_resolved(schema, schemas) for base in model.__mro__ for schema in REFUSED.get(base, ())]
    refused = [schema for schema in refused if set(schema["properties"]) <= set(properties)]
    if refused:
        own["not"] = {"anyOf": refused}
    return reference


def _with_own_words(own: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return what a field holds with the words of its own schema."""
    words = {
        name: own[name] for name in ("title", "description", "default") if own.get(name) not in (None, "")
    }
    return words | schema


def _resolved(value: Any, schemas: dict[str, Any]) -> Any:
    """Return a schema with references in place of models, which are added."""
    if isinstance(value, type):
        return _add(value, schemas)
    if isinstance(value, dict):
        return {name: _resolved(inner, schemas) for name, inner in value.items()}
    return [_resolved(inner, schemas) for inner in value] if isinstance(value, list) else value


def _add_bounds(name: str, schema: dict[str, Any], context: int) -> None:
    """Add the range that `SamplingParams` checks, under the field's own name or another one."""
    low, high, text = RANGES.get(_SAME_RANGE.get(name, name), (None, None, ""))
    if name in _SMALLEST:
        low, high, text = _SMALLEST[name], context, ""
    elif low is None:
        return
    if name in _LENGTHS:
        high = context
    above = "exclusiveMinimum" if low == math.ulp(0.0) else "minimum"
    for branch in schema.get("anyOf", [schema]):
        if branch.get("type") in ("integer", "number"):
            branch.update({above: 0 if above != "minimum" else low, "maximum": high})
            if text:
                branch["description"] = text


def _of_model(served: Served) -> dict[str, Any]:
    """Return the schemas that the model decides."""
    digits = len(str(served.vocab_size)) - 1
    fewer = f"^(0|[1-9][0-9]{{0,{max(0, digits - 1)}}})$"
    return {
        "Model": {"enum": list(served.names)},
        "TokenId": {"type": "integer", "minimum": 0, "maximum": served.vocab_size - 1},
        "MaxTokens": {"type": "integer", "minimum": 1, "maximum": served.max_model_len - 1},
        "LogitBias": {
            "type": "object",
            "propertyNames": {"pattern": fewer},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        "Suffix": {"type": "string"} if served.fills_in else {"const": ""},
        "Dimensions": {"type": "integer", "minimum": 1, "maximum": served.hidden_size or 2**31},
        "JsonSchema": _JSON_SCHEMA,
    }


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
# What stands in a path, by its name.
_IDS = {"model_id": component("Model")}
# Fields under another name than that of their range.
_SAME_RANGE = {
    "top_logprobs": "logprobs",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "best_of": "n",
}
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "min_tokens")
_SMALLEST = {"repeat_last_n": -1, "truncate_prompt_tokens": 1, "top_n": 1, "max_tokens_per_doc": 1}
# The keywords that every grammar holds; docs/structured-output.md has the others.
_JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"enum": ["string", "integer", "number", "boolean", "null", "object", "array"]},
        "title": {"type": "string"},
        "description": {"type": "string"},
        "properties": {"type": "object", "additionalProperties": JSON_SCHEMA},
        "items": JSON_SCHEMA,
        "enum": {"type": "array", "minItems": 1},
    },
    "additionalProperties": False,
    "not": {"required": ["type", "enum"]},
}
