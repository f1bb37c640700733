"""llama.cpp's server on an agent's trace: its process, what it is asked, and how its prompts are tokenized."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import httpx
from benchmarks.agent.trace import Answered, Conversation

START_TIMEOUT_S = 300.0


class LlamaServer:
    """`llama-server` on a free port for the time of a ``with`` block, which gets its address."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    def __enter__(self) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._log = tempfile.TemporaryFile("w+b")
        command = [*self._command, "--host", "127.0.0.1", "--port", str(port), "--jinja", "--metrics"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"{url}/health").is_success:
                    return url
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        self._log.seek(0)
        output = self._log.read().decode(errors="replace")
        self.__exit__()
        raise SystemExit(f"llama-server did not start: {output[-2000:]}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def rendered_by_llama(client: httpx.Client, one: Conversation) -> tuple[int, ...]:
    """Return the token ids of the prompt."""
    text = client.post("/apply-template", json=one.openai_body()).raise_for_status().json()["prompt"]
    body = {"content": text, "add_special": True, "parse_special": True}
    return tuple(client.post("/tokenize", json=body).raise_for_status().json()["tokens"])


def ask_llama(client: httpx.Client, one: Conversation) -> Answered:
    """Ask by a streamed chat completion; the time to the first token is that of the prompt, by its own clock."""
    body = one.openai_body() | {"stream": True, "cache_prompt": True, "return_tokens": True}
    text, calls, timings = "", {}, {}
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        if answer.is_error:
            raise SystemExit(f"llama-server: {answer.status_code} {answer.read().decode()}")
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event: dict[str, Any] = json.loads(line[6:])
            timings = event.get("timings", timings)
            for choice in event.get("choices", ()):
                text += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", ()):
                    name, arguments = calls.get(call["index"], ("", ""))
                    function = call["function"]
                    calls[call["index"]] = (
                        name + (function.get("name") or ""),
                        arguments + (function.get("arguments") or ""),
                    )
    cached = timings["cache_n"]
    return Answered(
        text, tuple(calls.values()), (), cached + timings["prompt_n"], cached, timings["prompt_ms"] / 1e3
    )
