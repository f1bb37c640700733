"""A model that knows one tool, behind the real API: ``python -m tests.clients.scripted``.

Asked for the weather, it calls ``get_weather``; asked to ``CALL {"name": …, "arguments": …}``, it calls that; given a
tool's result, it says what it was told; else it says hello.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from tests.api.asgi_client import app_with_jobs
from tests.api.fake_frontend import FakeFrontend, say

from quire.api.server import run
from quire.metrics.log import configure

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
NAMED = re.compile(r'CALL (\{"name": "\w+", "arguments": \{[^{}]*\}\})')
# Tool results of every dialect are rendered as messages of the role "tool".
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% endfor %}{# reasoning_effort #}"


def script(prompt: Sequence[int], index: int, seed: int) -> Sequence[int]:
    """Return the ids of the answer, which depends on the last message alone."""
    text = bytes(token for token in prompt if token < 256).decode(errors="replace")
    _, _, last = text.rpartition("<tool>")
    if last != text and "<user>" not in last:
        return say("It is " + last.strip().strip('"') + ".")
    asked = text.rpartition("<user>")[2]
    if match := NAMED.search(text.rpartition("<assistant>")[2]):
        return say(f"<tool_call>\n{match[1]}\n</tool_call>")
    return say(f"<think>I look.</think>{CALL}" if "weather" in asked else "Hello.")


def frontend() -> FakeFrontend:
    """Return a frontend whose model is called ``quill``, as the real one is."""
    made = FakeFrontend(script, max_model_len=65536, thinks=True, template=TEMPLATE)
    made.model = replace(made.model, names=("quill",), vocab_size=4096)  # as Quill
    return made


def main(batch_dir: str) -> int:
    configure("info")
    app = app_with_jobs(frontend(), tool_format="hermes", batch_dir=batch_dir)
    return run(app, port=0, on_ready=lambda url, _: print(url, flush=True))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
