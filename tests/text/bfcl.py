"""Tool calls of the Berkeley Function-Calling Leaderboard, rendered by chat templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from quire.errors import RequestError
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import SpecialTokens

Call = tuple[str, dict[str, Any]]
_JSON_TYPE = {"dict": "object", "float": "number", "tuple": "array", "any": None}


@dataclass(frozen=True)
class Case:
    """A question, the tools, and the calls that answer it."""

    name: str
    question: str
    tools: tuple[dict[str, Any], ...]
    calls: tuple[Call, ...]

    @property
    def schemas(self) -> dict[str, Any]:
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}


def contradicts_itself(case: Case) -> bool:
    """Whether an expected argument is not of the type that the case's own schema gives it (a string True …).

    Formats that write values without quotes can only be read by the schema.
    """
    return not all(
        Draft202012Validator(case.schemas[name]).is_valid(arguments)
        for name, arguments in case.calls
        if name in case.schemas
    )


def cases(data: Path, name: str) -> Iterator[Case]:
    folder = data / "conformance" / "bfcl"
    rows = [json.loads(line) for line in (folder / f"BFCL_v4_{name}.json").read_text().splitlines()]
    answers = [
        json.loads(line)
        for line in (folder / "possible_answer" / f"BFCL_v4_{name}.json").read_text().splitlines()
    ]
    for row, answer in zip(rows, answers, strict=True):
        assert row["id"] == answer["id"]
        tools = tuple(
            {"type": "function", "function": {**f, "parameters": _schema(f["parameters"])}}
            for f in row["function"]
        )
        calls = tuple((n, _first(args)) for call in answer["ground_truth"] for n, args in call.items())
        yield Case(row["id"], row["question"][0][-1]["content"], tools, calls)


def _schema(schema: Any) -> Any:
    """BFCL's type names → JSON Schema's."""
    if isinstance(schema, list):
        return [_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _schema(value) for key, value in schema.items()}
    if isinstance(result.get("type"), str):
        kind = _JSON_TYPE.get(result["type"], result["type"])
        result = {**result, "type": kind} if kind else {k: v for k, v in result.items() if k != "type"}
    return result


def _first(arguments: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the first acceptable value of each argument; "" means that it may be left out."""
    chosen = {}
    for name, values in arguments.items():
        value = next((v for v in values if v != ""), "")
        if value != "":
            chosen[name] = _first(value) if isinstance(value, dict) and _is_choice(value) else value
    return chosen


def _is_choice(value: dict[str, Any]) -> bool:
    return all(isinstance(v, list) for v in value.values())


def template(path: Path) -> ChatTemplate:
    special = SpecialTokens({"bos_token": "<s>", "eos_token": "</s>"})
    return ChatTemplate({"default": path.read_text()}, special, lambda: datetime(2025, 1, 1))


def rendered(template: ChatTemplate, case: Case) -> tuple[str, str] | None:
    """Return (prompt, the template's text of an answer with the calls); None if it does not render all calls."""
    for as_text in (False, True):
        calls = [
            {
                "type": "function",
                "id": f"call{i:05d}",
                "function": {"name": n, "arguments": json.dumps(args) if as_text else args},
            }
            for i, (n, args) in enumerate(case.calls)
        ]
        try:
            prompts = [_render(template, case, [], add_generation_prompt=begin) for begin in (True, False)]
            whole = _render(template, case, calls)
            if len(calls) > 1 and whole == _render(template, case, calls[:1]):
                return None  # only the first one
        except RequestError:
            continue
        # Some templates begin an answer differently from how they repeat one.
        prompt = next((p for p in prompts if whole.startswith(p)), _common(prompts[1], whole))
        text = whole[len(prompt) :]
        if all(name in text for name, _ in case.calls):
            return prompt, text
    return None


def _common(first: str, second: str) -> str:
    return first[
        : next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
    ]


def _render(template: ChatTemplate, case: Case, calls: list[dict[str, Any]], **kwargs: bool) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": case.question}]
    if calls:
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    return template.render(messages, tools=list(case.tools), **kwargs)
