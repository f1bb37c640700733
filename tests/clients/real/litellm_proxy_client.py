"""LiteLLM's proxy before a server: OpenAI's library over it, two turns with a tool, streamed, by a schema; messages."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from check import ANSWER, CITY, QUESTION, QUILL, SCRIPTED, STORY, TOOL, check, get_weather
from openai import OpenAI

KEY = "sk-of-this-test-alone"
CONFIG = {
    "model_list": [
        {
            "model_name": name,
            "litellm_params": {"model": f"{provider}/quill", "api_base": url, "api_key": "none"},
        }
        for name, provider, url in (
            ("quill", "hosted_vllm", QUILL + "/v1"),
            ("scripted", "hosted_vllm", SCRIPTED + "/v1"),
            ("messages", "anthropic", SCRIPTED),
        )
    ]
}


@contextmanager
def proxy() -> Iterator[str]:
    """Run LiteLLM's proxy on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(CONFIG))
        program = Path(sys.executable).with_name("litellm")
        command = [
            program,
            "--config",
            config,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--telemetry",
            "False",
        ]
        env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, env=env)
        try:
            for _ in range(600):
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5)
                    break
                except OSError:
                    assert process.poll() is None, (Path(folder) / "log").read_text()[-2000:]
                    time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


with proxy() as url:
    client = OpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0)

    @check("two turns with a tool, whole and streamed")
    def _() -> None:
        for name in ("scripted", "messages"):
            turns: list[Any] = []
            for _ in range(2):
                turns.append({"role": "user", "content": QUESTION})
                fields = {"model": name, "messages": turns, "tools": [TOOL], "max_tokens": 400}
                (call,) = client.chat.completions.create(**fields).choices[0].message.tool_calls
                assert json.loads(call.function.arguments) == {"city": "Zürich"}, name
                turns.append({"role": "assistant", "content": None, "tool_calls": [call.model_dump()]})
                turns.append({"role": "tool", "tool_call_id": call.id, "content": get_weather("Zürich")})
                chunks = client.chat.completions.create(stream=True, **fields)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                assert text == ANSWER, (name, text)
                turns.append({"role": "assistant", "content": text})

    @check("a streamed chat is the whole one")
    def _() -> None:
        fields = {"model": "quill", "messages": STORY, "max_tokens": 16, "temperature": 0}
        whole = client.chat.completions.create(**fields).choices[0].message.content
        chunks = client.chat.completions.create(stream=True, **fields)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole

    @check("an answer by a schema")
    def _() -> None:
        form = {"type": "json_schema", "json_schema": {"name": "City", "schema": CITY, "strict": True}}
        answer = client.chat.completions.create(
            model="quill", messages=STORY, response_format=form, max_tokens=400
        )
        assert json.loads(answer.choices[0].message.content)["city"] in ("Bern", "Zürich"), answer
