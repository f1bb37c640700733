"""What the fields of the wire models hold, for ``/openapi.json``.

A wire model checks the type of a field; lists and objects in it are parsed by other wire models. `HOLDS` says which
model reads what; a model in a schema stands for the reference to it. `ONE_OF` has the branches of models whose fields
depend on a type, and `REFUSED` what is refused of fields beside each other. Where a schema can only approximate what
is accepted (one number that is compared with another), the description is the narrower one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from quire.api import answer_form as form
from quire.api import fields
from quire.api import history as chat
from quire.api.dialects.anthropic import request as claude
from quire.api.dialects.ollama import request as llama
from quire.api.dialects.openai import fields as openai
from quire.api.dialects.openai import pooling, text_tools
from quire.api.dialects.responses import request as responses
from quire.api.dialects.responses import tools as tools
from quire.api.template_input import RESERVED
from quire.beam_fields import BEAM_NEUTRAL
from quire.engine.pooling import SCORINGS
from quire.http.wire import Wire
from quire.structured_outputs import KINDS

Schema = dict[str, Any]
NULL: Schema = {"type": "null"}
TRUE: Schema = {"const": True}
TEXT: Schema = {"type": "string", "minLength": 1}


def component(name: str) -> Schema:
    """Return the reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Any, **bounds: Any) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _any(*schemas: Any) -> Schema:
    return {"anyOf": list(schemas)}


def _null_or(*schemas: Any) -> Schema:
    return {"anyOf": [*schemas, NULL]}


def _object(*required: str, **properties: Any) -> Schema:
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**made, "required": list(required)} if required else made


def _parts(*kinds: str) -> tuple[Schema, Schema]:
    """Text, or a list of parts of these types."""
    return {"type": "string"}, _list(
        _object("type", "text", type={"enum": list(kinds)}, text={"type": "string"})
    )


MODEL, TOKEN_ID, JSON_SCHEMA = map(component, ("Model", "TokenId", "JsonSchema"))
TOOL_NAME: Schema = {"type": "string", "pattern": f"^(?:{form.NAME.pattern})$"}
_REGEX: Schema = {**TEXT, "format": "regex"}
_LARK: Schema = {**TEXT, "format": "lark"}
_FORM = _object(
    "format", format=_object("type", "json_schema", type={"const": "json_schema"}, json_schema=JSON_SCHEMA)
)
_FORM_OF: dict[str, Schema] = {
    "json": JSON_SCHEMA,
    "regex": _REGEX,
    "choice": _list(TEXT, minItems=1),
    "grammar": _LARK,
    "json_object": TRUE,
    "structural_tag": _FORM,
}
_STOP = _null_or(TEXT, _list(TEXT))
_LIMIT = {"type": "number", "exclusiveMinimum": 0, "maximum": fields.MAX_DEADLINE_MS}
_DEADLINE = _null_or(_LIMIT, _object("total", total=_LIMIT))
_FUNCTION = _object(
    "name",
    name=TOOL_NAME,
    description={"type": ["string", "null"]},
    parameters=_null_or(JSON_SCHEMA),
    strict={"type": ["boolean", "null"]},
)
_TOOLS = _null_or(_list(_object("function", type={"const": "function"}, function=_FUNCTION)))
_NAMED = _object("type", "function", type={"const": "function"}, function=_object("name", name=TOOL_NAME))
_CHOICE: Schema = {"enum": ["none", "auto", "required"]}
_VARIABLES = _null_or({"type": "object", "propertyNames": {"not": {"enum": list(RESERVED)}}})
_PROMPT = _any(TEXT, _list(TOKEN_ID, minItems=1), _list(_any(TEXT, _list(TOKEN_ID, minItems=1)), minItems=1))
_NO_EDITS = _null_or(_object(edits=_list({}, maxItems=0)))
_BLOCKS = ({"type": "string"}, _list(claude.TextBlock))
_ITEMS = (
    responses.MessageItem, responses.CallItem, responses.CustomCallItem, responses.OutputItem, responses.ReasoningItem,
)  # fmt: skip

# Of (model, field), and of the models derived from the model.
HOLDS: dict[tuple[type[Wire], str], Schema] = {
    (Wire, "model"): _null_or(MODEL),
    (Wire, "chat_template_kwargs"): _VARIABLES,
    (Wire, "deadline_ms"): _DEADLINE,
    (Wire, "stop"): _STOP,
    (Wire, "tools"): _TOOLS,
    (fields.GenerationFields, "stream_options"): _null_or(fields.StreamOptions),
    (fields.GenerationFields, "logit_bias"): _null_or(component("LogitBias")),
    (fields.GenerationFields, "stop_token_ids"): _null_or(_list(TOKEN_ID)),
    (fields.GenerationFields, "allowed_token_ids"): _null_or(_list(TOKEN_ID, minItems=1)),
    (fields.GenerationFields, "bad_words"): _null_or(_list(TEXT)),
    (fields.GenerationFields, "response_format"): _null_or(form.ResponseFormat),
    (fields.GenerationFields, "structured_outputs"): _null_or(form.StructuredOutputs),
    **{(fields.GenerationFields, name): _null_or(_FORM_OF[kind]) for name, kind in form.ALIASES.items()},
    (fields.GenerationFields, "guided_whitespace_pattern"): _null_or(_REGEX),
    (openai.CompletionRequest, "prompt"): _PROMPT,
    (openai.CompletionRequest, "suffix"): component("Suffix"),
    (llama.OllamaGenerateRequest, "suffix"): component("Suffix"),
    (pooling.EmbeddingRequest, "dimensions"): _null_or(component("Dimensions")),
    (llama.EmbedRequest, "dimensions"): _null_or(component("Dimensions")),
    (openai.ChatPrompt, "messages"): _list(chat.Message, minItems=1),
    (openai.ChatRequest, "tool_choice"): _null_or(_CHOICE, _NAMED),
    (text_tools.TokenizeRequest, "messages"): _null_or(_list(chat.Message, minItems=1)),
    (text_tools.DetokenizeRequest, "tokens"): _list(TOKEN_ID),
    (chat.Message, "content"): _null_or(*_parts("text")),
    (chat.Message, "tool_calls"): _null_or(_list(chat.ToolCall)),
    (chat.Message, "function_call"): _null_or(chat.FunctionCall),
    (chat.ToolCall, "function"): _any(chat.FunctionCall),
    **{(form.StructuredOutputs, name): _null_or(schema) for name, schema in _FORM_OF.items()},
    (form.StructuredOutputs, "whitespace_pattern"): _null_or(_REGEX),
    (form.ResponseFormat, "json_schema"): _null_or(form.JsonSchemaFormat),
    (form.ResponseFormat, "schema"): _null_or(JSON_SCHEMA),
    (form.ResponseFormat, "value"): _null_or(JSON_SCHEMA, _REGEX),
    (form.ResponseFormat, "format"): _null_or(_FORM["properties"]["format"]),
    (form.JsonSchemaFormat, "schema"): JSON_SCHEMA,
    (claude.Turn, "content"): _any({"type": "string"}, _list(_any(*claude.BLOCKS))),
    (claude.AnthropicFields, "messages"): _list(claude.Turn, minItems=1),
    (claude.AnthropicFields, "system"): _null_or(*_BLOCKS),
    (claude.AnthropicFields, "tools"): _null_or(_list(claude.Tool)),
    (claude.AnthropicFields, "tool_choice"): _null_or(claude.ToolChoice),
    (claude.AnthropicFields, "thinking"): _null_or(claude.ThinkingSettings),
    (claude.AnthropicFields, "output_config"): _null_or(claude.OutputConfig),
    (claude.AnthropicFields, "context_management"): _NO_EDITS,
    (claude.AnthropicFields, "thread"): _null_or(_object(type={"const": "new"})),
    (claude.MessagesRequest, "metadata"): _null_or(claude.Metadata),
    (claude.MessagesRequest, "stop_sequences"): _null_or(_list(TEXT)),
    (claude.ToolResultBlock, "content"): _any(*_BLOCKS),
    (claude.OutputConfig, "format"): _null_or(claude.OutputConfigFormat),
    (claude.OutputConfigFormat, "schema"): JSON_SCHEMA,
    (claude.Tool, "name"): TOOL_NAME,
    (claude.Tool, "input_schema"): JSON_SCHEMA,
    (responses.ResponsesRequest, "input"): _any({"type": "string"}, _list(_any(*_ITEMS), minItems=1)),
    (responses.ResponsesRequest, "include"): _null_or(_list({"enum": list(responses.INCLUDED)})),
    (responses.ResponsesRequest, "tools"): _null_or(
        _list(_any(tools.FunctionTool, tools.CustomTool, tools.Namespace))
    ),
    (responses.ResponsesRequest, "tool_choice"): _null_or(_CHOICE, tools.NamedChoice),
    (responses.ResponsesRequest, "text"): _null_or(responses.TextSettings),
    (responses.ResponsesRequest, "reasoning"): _null_or(responses.Reasoning),
    (responses.ResponsesRequest, "context_management"): _null_or(_list({}, maxItems=0)),
    (responses.TextSettings, "format"): _null_or(responses.TextFormat),
    (responses.TextFormat, "schema"): _null_or(JSON_SCHEMA),
    (responses.MessageItem, "content"): _any(*_parts(*responses.TEXT_PARTS)),
    (responses.OutputItem, "output"): _any(*_parts(*responses.TEXT_PARTS)),
    (responses.ReasoningItem, "summary"): _any(*_parts(*responses.THOUGHT_PARTS)),
    (responses.ReasoningItem, "content"): _any(*_parts(*responses.THOUGHT_PARTS)),
    (tools.FunctionTool, "name"): TOOL_NAME,
    (tools.FunctionTool, "parameters"): _null_or(JSON_SCHEMA),
    (tools.CustomTool, "name"): TOOL_NAME,
    (tools.CustomTool, "format"): _null_or(tools.CustomFormat),
    (tools.Namespace, "name"): {"type": "string", "pattern": r"^[a-zA-Z0-9_\-]{1,63}$"},
    (tools.Namespace, "tools"): _list(_any(tools.FunctionTool, tools.CustomTool)),
    (llama.OllamaFields, "options"): _null_or(llama.Options),
    (llama.OllamaFields, "format"): _null_or({"enum": ["", "json"]}, JSON_SCHEMA),
    (llama.OllamaChatRequest, "messages"): _null_or(_list(llama.OllamaMessage)),
    (llama.OllamaGenerateRequest, "context"): _null_or(_list(TOKEN_ID)),
    (llama.OllamaMessage, "tool_calls"): _null_or(_list(chat.ToolCall)),
    (llama.OllamaMessage, "images"): _null_or(_list({"type": "string"}, maxItems=0)),
    (llama.OllamaGenerateRequest, "images"): _null_or(_list({"type": "string"}, maxItems=0)),
    (llama.EmbedRequest, "input"): _any(TEXT, _list(TEXT)),
    (llama.EmbeddingsRequest, "prompt"): TEXT,
    (pooling.EmbeddingRequest, "input"): _PROMPT,
    (pooling.ScoringFields, "scoring"): {"enum": list(SCORINGS)},
    (pooling.RerankRequest, "query"): TEXT,
    (pooling.RerankRequest, "documents"): _list(_any(TEXT, pooling.Document), minItems=1),
    (pooling.Document, "text"): TEXT,
    (pooling.ScoreRequest, "text_1"): TEXT,
    (pooling.ScoreRequest, "text_2"): _any(TEXT, _list(TEXT, minItems=1)),
}


def _kind(block: type[Wire]) -> str:
    """Return the one type of a block."""
    (kind,) = get_args(block.model_fields["type"].annotation)
    return str(kind)


def _kinds(name: str, kinds: dict[str, dict[str, Any]], absent: Iterable[str] = ()) -> list[Schema]:
    """The branches of a model by its field ``name``: what other fields are; a field that is None must be given."""
    return [
        {
            "required": [name, *(field for field, value in fields.items() if value is None)],
            "properties": {
                name: {"const": kind},
                **dict.fromkeys(set(absent) - set(fields), NULL),
                **{field: {"not": NULL} if value is None else value for field, value in fields.items()},
            },
        }
        for kind, fields in kinds.items()
    ]


_OTHERS = [role for role in chat.ROLES if role != "assistant"]
_ASSISTANT = {"properties": {"role": {"const": "assistant"}}}
_NO_CHAT = dict.fromkeys(openai.ChatPrompt.model_fields, NULL)
_OFF: Schema = {"enum": [False, None]}
_JSON_OPTIONS: Schema = {
    "whitespace_pattern": NULL, "disable_any_whitespace": {"const": False}, "disable_additional_properties": _OFF,
}  # fmt: skip
# Each body matches one branch of its model at least.
ONE_OF: dict[type[Wire], list[Schema]] = {
    chat.Message: [
        _ASSISTANT,
        {
            "required": ["content"],
            "properties": {
                "role": {"enum": _OTHERS}, "content": {"not": NULL}, "tool_calls": NULL, "function_call": NULL,
            },
        },
    ],
    llama.OllamaMessage: [_ASSISTANT, {"properties": {"role": {"not": {"const": "assistant"}}, "tool_calls": NULL}}],
    form.ResponseFormat: _kinds(
        "type",
        {
            "text": {},
            "json_object": {"schema": {}},
            "json_schema": {"json_schema": None},
            "json": {"value": JSON_SCHEMA},
            "regex": {"value": _REGEX},
            "structural_tag": {"format": None},
        },
        ("json_schema", "schema", "value", "structures", "triggers", "format"),
    ),
    form.StructuredOutputs: [
        {
            "required": [kind],
            "properties": {
                **dict.fromkeys(set(KINDS) - {kind}, NULL),
                kind: {"not": NULL},
                **({"disable_any_whitespace": {"const": False}} if kind.startswith("json") else _JSON_OPTIONS),
                **({"disable_additional_properties": {}} if kind == "structural_tag" else {}),
            },
        }
        for kind in KINDS
    ],
    claude.Turn: [
        {
            "properties": {
                "role": {"const": role},
                "content": _any({"type": "string"}, _list(_any(*[b for b in claude.BLOCKS if _kind(b) in kinds]))),
            }
        }
        for role, kinds in claude.ALLOWED.items()
    ],
    claude.ThinkingSettings: _kinds(
        "type", {"enabled": {"budget_tokens": {}}, "disabled": {}, "adaptive": {}}, ["budget_tokens"]
    ),
    claude.ToolChoice: _kinds("type", {"auto": {}, "any": {}, "none": {}, "tool": {"name": None}}, ["name"]),
    responses.TextFormat: _kinds(
        "type",
        {"text": {}, "json_object": {}, "json_schema": {"schema": None, "name": {}, "strict": {}}},
        ("name", "schema", "strict"),
    ),
    tools.CustomFormat: [
        *_kinds("type", {"text": {}}, ("syntax", "definition")),
        *[
            {
                "required": ["syntax", "definition"],
                "properties": {
                    "type": {"const": "grammar"}, "syntax": {"const": syntax}, "definition": definition,
                },
            }
            for syntax, definition in (("regex", _REGEX), ("lark", _LARK))
        ],
    ],
    text_tools.TokenizeRequest: [
        {"required": ["prompt"], "properties": {**_NO_CHAT, "prompt": TEXT}},
        {"required": ["messages"], "properties": {"prompt": NULL, "messages": {"not": NULL}}},
    ],
}  # fmt: skip

_INTEGER: Schema = {"type": "integer"}
_SOME: Schema = {"type": "integer", "minimum": 1}
_LONG: Schema = {"type": "integer", "minimum": 2}
_SET: Schema = {"not": {"enum": [None, False, ""]}}
_FORMS = ("response_format", "structured_outputs", *form.ALIASES)
_FULL = {"type": "array", "minItems": 1}


def _without(name: str, value: Schema, other: str, needed: Schema) -> Schema:
    """``name`` is such a ``value``, and ``other`` is not as ``needed``."""
    return {"required": [name], "properties": {name: value, other: {"not": needed}}}


def _beside(name: str, value: Schema, other: str, wrong: Schema) -> Schema:
    """Both are given, with these values."""
    return {"required": [name, other], "properties": {name: value, other: wrong}}


def _but(*neutral: Any) -> Schema:
    return {"not": {"enum": [None, *neutral]}}


_FORCED: Schema = {"enum": ["required"]}
REFUSED: dict[type[Wire], list[Schema]] = {
    fields.GenerationFields: [
        _without("stream_options", {"type": "object"}, "stream", TRUE),
        _beside("best_of", _LONG, "stream", TRUE),
        _beside("best_of", _INTEGER, "n", _LONG),
        {"required": ["min_tokens"], "properties": {"min_tokens": _LONG}},
        *[_beside(one, _SET, other, _SET) for i, one in enumerate(_FORMS) for other in _FORMS[i + 1 :]],
        *[_beside("ignore_eos", TRUE, name, _SET) for name in _FORMS],
        {"required": ["guided_whitespace_pattern"], "properties": {"guided_whitespace_pattern": {"type": "string"}}},
        _without("length_penalty", _but(1), "use_beam_search", TRUE),
        _without("early_stopping", _but(False), "use_beam_search", TRUE),
        *[
            _beside("use_beam_search", TRUE, name, _but(*[list(v) if isinstance(v, tuple) else v for v in neutral]))
            for name, neutral in BEAM_NEUTRAL.items()
        ],
    ],
    openai.ChatPrompt: [_beside("continue_final_message", TRUE, "add_generation_prompt", TRUE)],
    openai.ChatRequest: [
        _beside("max_completion_tokens", _INTEGER, "max_tokens", _INTEGER),
        _without("top_logprobs", _SOME, "logprobs", TRUE),
        _without("tool_choice", _FORCED, "tools", _FULL),
    ],
    openai.CompletionRequest: [_beside("echo", TRUE, "suffix", TEXT)],
    claude.AnthropicFields: [
        _without("tool_choice", {"type": "object", "properties": {"type": {"enum": ["any", "tool"]}}}, "tools", _FULL)
    ],
    responses.ResponsesRequest: [
        _beside("background", TRUE, "stream", TRUE),
        _beside("background", TRUE, "store", {"const": False}),
        _without("top_logprobs", _SOME, "include", {"contains": {"const": responses.INCLUDED[0]}}),
        _without("tool_choice", _FORCED, "tools", _FULL),
    ],
    llama.OllamaFields: [_without("top_logprobs", _SOME, "logprobs", TRUE)],
    pooling.ScoringFields: [_without("instruction", {"type": "string"}, "scoring", {"const": "yes_no"})],
}  # fmt: skip
