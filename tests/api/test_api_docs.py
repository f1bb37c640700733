"""docs/api.md and docs/metrics.md say what the code does. ``python -m tests.api.test_api_docs`` writes the tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.api.asgi_client import app_with_jobs
from tests.api.fake_frontend import FakeFrontend

from quire.api import fields
from quire.api.answer_form import FUNCTION, TOOL, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from quire.api.app import create_app
from quire.api.dialects.anthropic import request as anthropic
from quire.api.dialects.ollama import request as ollama
from quire.api.dialects.ollama.models import ShowRequest
from quire.api.dialects.ollama.request import EmbeddingsRequest, EmbedRequest
from quire.api.dialects.openai import fields as openai
from quire.api.dialects.openai.pooling import Document, EmbeddingRequest, RerankRequest, ScoreRequest
from quire.api.dialects.openai.text_tools import DetokenizeRequest, TokenizeRequest
from quire.api.dialects.responses import request as responses
from quire.api.dialects.responses.tools import CustomFormat, CustomTool, FunctionTool, NamedChoice, Namespace
from quire.api.dialects.tei import endpoints as tei
from quire.api.fields import DeadlineMs
from quire.api.history import Message, TextPart
from quire.api.settings import ApiSettings
from quire.http.field_rules import Table, Use, field_table, rules_of, sections
from quire.http.wire import Wire
from quire.jobs.message_batches import MessageBatchRequest
from quire.jobs.routes import BatchRequest, ExpiresAfter
from quire.metrics.prometheus import Exposition

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN = "<!-- fields: written by `python -m tests.api.test_api_docs` -->\n"
END = "<!-- end of fields -->\n"
MODELS: dict[str, type[Wire] | Table] = {
    "/v1/chat/completions": openai.ChatRequest,
    "/v1/completions": openai.CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "tools[i]": TOOL,
    "tools[i].function": FUNCTION,
    "messages[i]": Message,
    "/v1/batches": BatchRequest,
    "/v1/messages/batches": MessageBatchRequest,
    "output_expires_after": ExpiresAfter,
    "deadline_ms": DeadlineMs,
    "stream_options": fields.StreamOptions,
    "response_format": ResponseFormat,
    "response_format.json_schema": JsonSchemaFormat,
    "structured_outputs": StructuredOutputs,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/v1/rerank: documents[i]": Document,
    "/v1/score": ScoreRequest,
    "/v1/messages": anthropic.MessagesRequest,
    "/v1/messages/count_tokens": anthropic.CountTokensRequest,
    "/v1/messages: messages[i]": anthropic.Turn,
    "/v1/messages: text": anthropic.TextBlock,
    "/v1/messages: thinking (block)": anthropic.ThinkingBlock,
    "/v1/messages: tool_use": anthropic.ToolUseBlock,
    "/v1/messages: tool_result": anthropic.ToolResultBlock,
    "/v1/messages: tools[i]": anthropic.Tool,
    "/v1/messages: tool_choice": anthropic.ToolChoice,
    "/v1/messages: thinking": anthropic.ThinkingSettings,
    "/v1/messages: output_config": anthropic.OutputConfig,
    "/v1/messages: output_config.format": anthropic.OutputConfigFormat,
    "/v1/messages: metadata": anthropic.Metadata,
    "/v1/responses": responses.ResponsesRequest,
    "/v1/responses: reasoning": responses.Reasoning,
    "/v1/responses: text": responses.TextSettings,
    "/v1/responses: text.format": responses.TextFormat,
    "/v1/responses: tools[i]": FunctionTool,
    "/v1/responses: tools[i] (custom)": CustomTool,
    "/v1/responses: tools[i].format": CustomFormat,
    "/v1/responses: tools[i] (namespace)": Namespace,
    "/v1/responses: tool_choice": NamedChoice,
    "/v1/responses: message": responses.MessageItem,
    "/v1/responses: function_call": responses.CallItem,
    "/v1/responses: custom_tool_call": responses.CustomCallItem,
    "/v1/responses: function_call_output": responses.OutputItem,
    "/v1/responses: reasoning (item)": responses.ReasoningItem,
    "/v1/responses: parts of a content": TextPart,
    "/api/chat": ollama.OllamaChatRequest,
    "/api/chat: messages[i]": ollama.OllamaMessage,
    "/api/generate": ollama.OllamaGenerateRequest,
    "/api/chat, /api/generate: options": ollama.Options,
    "/api/embed": EmbedRequest,
    "/api/embeddings": EmbeddingsRequest,
    "/api/show": ShowRequest,
    "/embed, /": tei.TeiEmbedRequest,
    "/embed_all": tei.TokenRowsRequest,
    "/embed_sparse": tei.TokenRowsRequest,
    "/rerank (TEI's form)": tei.TeiRerankRequest,
    "/predict": tei.PredictRequest,
    "/similarity": tei.SimilarityRequest,
    "/similarity: inputs": tei.SimilarityInputs,
    "/classify": tei.ClassifyRequest,
    "/v2/embed": tei.CohereEmbedRequest,
}
TABLES = {title: field_table(m) if isinstance(m, type) else m for title, m in MODELS.items()}


EVERYWHERE = sections()["SampledFields"]
TARGETS = {name for names in EVERYWHERE["mapped"].values() for name in names}
COMMON = {
    name: rule for name, rule in rules_of(["SampledFields"], TARGETS).items() if rule.use is not Use.USED
}


def render(tables: dict[str, Table]) -> str:
    """The section of docs/api.md between the markers."""
    lines = []
    for title, table in {"Every endpoint that samples: names of other servers": COMMON, **tables}.items():
        if table is not COMMON and COMMON.keys() <= table.keys():
            table = {name: rule for name, rule in table.items() if rule != COMMON.get(name)}
        lines += [f"### {title}" if table is COMMON else f"### `{title}`", ""]
        for use in (Use.USED, Use.NO_EFFECT):
            names = ", ".join(f"`{name}`" for name, rule in sorted(table.items()) if rule.use is use)
            if names:
                lines += [f"{use.value.capitalize()}: {names}.", ""]
        mapped = [
            f"`{name}` (`{rule.used_as}`)" for name, rule in sorted(table.items()) if rule.use is Use.MAPPED
        ]
        if mapped:
            lines += [f"Other names: {', '.join(mapped)}.", ""]
        refused = [(name, rule) for name, rule in sorted(table.items()) if rule.use is Use.REFUSED]
        if refused:
            lines += ["| refused | accepted beside null | |", "|---|---|---|"]
        for name, rule in refused:
            neutral = [f"`{json.dumps(value)}`" for value in rule.neutral]
            lines.append(f"| `{name}` | {', '.join(neutral)} | {rule.hint} |")
        lines.append("")
    return "\n".join(lines)


def test_the_field_tables_in_the_docs_are_those_of_the_code() -> None:
    text = (DOCS / "api.md").read_text()
    section = text.split(BEGIN)[1].split(END)[0]
    assert section == render(TABLES), "run: python -m tests.api.test_api_docs"


def test_every_route_is_in_the_docs() -> None:
    text = (DOCS / "api.md").read_text()
    app = app_with_jobs(FakeFrontend())
    for route in app.router.routes:
        path = route.path.replace("{model_id:path}", "{id}")  # type: ignore[attr-defined]
        assert f"{path}`" in text, path


def test_every_metric_is_in_the_docs_and_no_other() -> None:
    frontend = FakeFrontend()
    app = create_app(frontend, ApiSettings())  # type: ignore[arg-type]
    exposed = set()
    for family in Exposition(app.state.quire.metrics).collect():
        exposed.add(family.name + ("_total" if family.type == "counter" else ""))
    documented = set(re.findall(r"`((?:vllm|quire):[a-z0-9_]+)`", (DOCS / "metrics.md").read_text()))
    assert documented == exposed


if __name__ == "__main__":
    before = (DOCS / "api.md").read_text()
    head, tail = before.split(BEGIN)[0], before.split(END)[1]
    (DOCS / "api.md").write_text(head + BEGIN + render(TABLES) + END + tail)
