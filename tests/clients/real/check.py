"""What each client's script shares: the addresses, a tool, and `check`, which runs a function and prints how it ended.

Runs in the client's own environment: standard library only.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

# Of a client of encoders QUILL is a model of vectors, and SCRIPTED one that ranks.
QUILL = os.environ["QUILL_URL"]  # Quill behind a template with tools: it calls one where a call is required
SCRIPTED = os.environ[
    "SCRIPTED_URL"
]  # asked for the weather, it calls get_weather; given the result, it answers
QUESTION = "What is the weather in Zürich?"
ANSWER = "It is 12 °C in Zürich."  # of the scripted server after the call
STORY = [{"role": "user", "content": "Tell me a story."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern", "Zürich"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": CITY}
TOOL = {"type": "function", "function": FUNCTION}

_failed: list[str] = []


def get_weather(city: str) -> str:
    """Return the weather in a city."""
    return f"12 °C in {city}"


def check(claim: str) -> Callable[[Callable[[], Any]], None]:
    """Run the function at once and print whether ``claim`` holds, as a line of JSON."""

    def run(function: Callable[[], Any]) -> None:
        error = None
        try:
            result = function()
            if inspect.iscoroutine(result):
                asyncio.run(result)
        except Exception as caught:
            where = traceback.extract_tb(caught.__traceback__)
            line = next((frame for frame in where if frame.filename == sys.argv[0]), where[-1])
            error = f"line {line.lineno}: {type(caught).__name__}: {caught}"[:1500]
            _failed.append(claim)
        print(json.dumps({"check": claim, "error": error}), flush=True)

    return run


def error_of(kind: type[Exception], call: Callable[[], Any]) -> Any:
    """Return the error of ``kind`` that ``call`` must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


@atexit.register
def _exit() -> None:
    if _failed:
        sys.stdout.flush()
        os._exit(1)
