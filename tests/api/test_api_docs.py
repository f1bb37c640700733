"""docs/api.md and docs/metrics.md say what the code does. ``python -m tests.api.test_api_docs`` writes the tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.api.fake_frontend import FakeFrontend

from quire.api import anthropic_fields, batch_fields, field_tables, pooling_fields, response_fields
from quire.api.app import create_app
from quire.api.fields import Rule, Use
from quire.api.settings import ApiSettings

DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN = "<!-- fields: written by `python -m tests.api.test_api_docs` -->\n"
END = "<!-- end of fields -->\n"
TABLES = {
    "/v1/chat/completions": field_tables.CHAT,
    "/v1/completions": field_tables.COMPLETIONS,
    "/tokenize": field_tables.TOKENIZE,
    "/detokenize": field_tables.DETOKENIZE,
    "tools[i]": field_tables.TOOL,
    "tools[i].function": field_tables.FUNCTION,
    "messages[i]": field_tables.MESSAGE,
    "/v1/batches": batch_fields.BATCH,
    "output_expires_after": batch_fields.EXPIRES_AFTER,
    "deadline_ms": field_tables.DEADLINE_MS,
    "stream_options": field_tables.STREAM_OPTIONS,
    "response_format": field_tables.RESPONSE_FORMAT,
    "response_format.json_schema": field_tables.JSON_SCHEMA_FORMAT,
    "structured_outputs": field_tables.STRUCTURED_OUTPUTS,
    "/v1/embeddings": pooling_fields.EMBEDDINGS,
    "/v1/rerank": pooling_fields.RERANK,
    "/v1/rerank: documents[i]": pooling_fields.DOCUMENT,
    "/v1/score": pooling_fields.SCORE,
    "/v1/messages": anthropic_fields.MESSAGES,
    "/v1/messages/count_tokens": anthropic_fields.COUNT_TOKENS,
    "/v1/messages: messages[i]": anthropic_fields.TURN,
    "/v1/messages: text": anthropic_fields.TEXT_BLOCK,
    "/v1/messages: thinking (block)": anthropic_fields.THINKING_BLOCK,
    "/v1/messages: tool_use": anthropic_fields.TOOL_USE_BLOCK,
    "/v1/messages: tool_result": anthropic_fields.TOOL_RESULT_BLOCK,
    "/v1/messages: tools[i]": anthropic_fields.TOOL,
    "/v1/messages: tool_choice": anthropic_fields.TOOL_CHOICE,
    "/v1/messages: thinking": anthropic_fields.THINKING,
    "/v1/messages: output_config": anthropic_fields.OUTPUT_CONFIG,
    "/v1/messages: output_config.format": anthropic_fields.OUTPUT_CONFIG_FORMAT,
    "/v1/messages: metadata": anthropic_fields.METADATA,
    "/v1/responses": response_fields.RESPONSES,
    "/v1/responses: reasoning": response_fields.REASONING,
    "/v1/responses: text": response_fields.TEXT,
    "/v1/responses: text.format": response_fields.TEXT_FORMAT,
    "/v1/responses: tools[i]": response_fields.TOOL,
    "/v1/responses: tool_choice": response_fields.TOOL_CHOICE,
    "/v1/responses: message": response_fields.MESSAGE_ITEM,
    "/v1/responses: function_call": response_fields.CALL_ITEM,
    "/v1/responses: function_call_output": response_fields.OUTPUT_ITEM,
    "/v1/responses: reasoning (item)": response_fields.REASONING_ITEM,
    "/v1/responses: parts of a content": response_fields.PART,
}


def render(tables: dict[str, dict[str, Rule]]) -> str:
    """The section of docs/api.md between the markers."""
    lines = []
    for title, table in tables.items():
        lines += [f"### `{title}`", ""]
        for use in (Use.USED, Use.NO_EFFECT):
            names = ", ".join(f"`{name}`" for name, rule in sorted(table.items()) if rule.use is use)
            if names:
                lines += [f"{use.value.capitalize()}: {names}.", ""]
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
    app = create_app(FakeFrontend(), ApiSettings())  # type: ignore[arg-type]
    for route in app.router.routes:
        path = route.path.replace("{model_id:path}", "{id}")  # type: ignore[attr-defined]
        assert f"{path}`" in text, path


def test_every_metric_is_in_the_docs_and_no_other() -> None:
    frontend = FakeFrontend()
    app = create_app(frontend, ApiSettings())  # type: ignore[arg-type]
    exposed = set()
    for family in app.state.quire.metrics.collect():
        exposed.add(family.name + ("_total" if family.type == "counter" else ""))
    documented = set(re.findall(r"`((?:vllm|quire):[a-z0-9_]+)`", (DOCS / "metrics.md").read_text()))
    assert documented == exposed


if __name__ == "__main__":
    before = (DOCS / "api.md").read_text()
    head, tail = before.split(BEGIN)[0], before.split(END)[1]
    (DOCS / "api.md").write_text(head + BEGIN + render(TABLES) + END + tail)
