"""Instructor: pydantic models by schemas, by JSON and by calls, over OpenAI's and Anthropic's packages."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
import instructor
import openai
from check import QUILL, STORY, check
from pydantic import BaseModel

raw = openai.OpenAI(base_url=QUILL + "/v1", api_key="none", max_retries=0)
ANEW: dict[str, Any] = {"model": "quill", "messages": STORY, "max_tokens": 400, "temperature": 0.0}


class Trip(BaseModel, extra="forbid"):
    """A trip."""

    city: Literal["Bern", "Zürich"]
    days: Literal[1, 2, 3]


@check("each mode of OpenAI's that a server decodes under a constraint")
def _() -> None:
    for mode in (
        instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA,
        instructor.Mode.RESPONSES_TOOLS,
    ):  # fmt: skip
        client = instructor.from_openai(raw, mode=mode)
        fields = dict(ANEW)
        if mode is instructor.Mode.RESPONSES_TOOLS:
            fields["max_output_tokens"] = fields.pop("max_tokens")
        trip = client.chat.completions.create(response_model=Trip, max_retries=0, **fields)
        assert isinstance(trip, Trip), mode


@check("a partial model, streamed")
def _() -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(response_model=Trip, **ANEW))
    assert parts[-1].city in ("Bern", "Zürich")


@check("Anthropic's tools")
def _() -> None:
    claude = anthropic.Anthropic(base_url=QUILL, api_key="none", max_retries=0)
    client = instructor.from_anthropic(claude)
    fields = {name: value for name, value in ANEW.items() if name != "temperature"}
    assert isinstance(client.messages.create(response_model=Trip, max_retries=0, **fields), Trip)
