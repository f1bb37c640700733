"""What the API loads with the first request for it is there, and a dialect is not loaded by another's requests."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from quire.api.dialect import Dialect
from quire.api.dialects import DIALECTS
from quire.api.late import Late

PLAIN = """
import sys
from tests.api.asgi_client import Api
from tests.api.fake_frontend import FakeFrontend, say
api = Api(FakeFrontend(lambda *_: say("ok")))
before = set(sys.modules)
body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
assert "[DONE]" in api.post("/v1/chat/completions", body).text
print(*sorted(name for name in sys.modules if name.startswith("quire.")))
print(*sorted(name for name in sys.modules if name.startswith("quire.") and name not in before))
"""


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_every_late_function_is_there(dialect: Dialect) -> None:
    for path, late in (*dialect.read.items(), *dialect.compute.items()):
        assert inspect.iscoroutinefunction(late.load()), path
    for handled in dialect.handled:
        place, _, method = handled.handler.rpartition(".")
        assert inspect.iscoroutinefunction(getattr(Late(place).load(), method)), handled.path


def test_a_chat_loads_no_other_dialect() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True, timeout=120
    )
    loaded, with_request = (line.split() for line in done.stdout.splitlines())
    assert with_request == []
    folders = {name.split(".")[3] for name in loaded if name.startswith("quire.api.dialects.")}
    # The store of responses reads its folder at the start, and a stage waits for clients that load a model.
    assert folders == {"openai", "responses", "ollama"}
    own = {
        name
        for name in loaded
        if name.startswith(("quire.api.dialects.responses.", "quire.api.dialects.ollama."))
    }
    assert own == {"quire.api.dialects.responses.store", "quire.api.dialects.ollama.loads"}
