"""`ModelLoads`: answers requests of Ollama's clients without a prompt, which ask only that the model is loaded."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.api.endpoint import CallStage, Client, GenerateEndpoint
from quire.api.job import served_name
from quire.api.late import Late
from quire.errors import CapacityError
from quire.http.body import send_json
from quire.http.wire import Ignored, parse

_HERE = "quire.api.dialects.ollama"
# The model of the body of each path, the field that has the prompt, and the answer to a request without one.
_LOADS: dict[str, tuple[Late, str, dict[str, Any]]] = {
    "/api/chat": (
        Late(f"{_HERE}.request:OllamaChatRequest"),
        "messages",
        {"message": {"role": "assistant", "content": ""}},
    ),
    "/api/generate": (Late(f"{_HERE}.request:OllamaGenerateRequest"), "prompt", {"response": ""}),
    "/api/embed": (Late(f"{_HERE}.request:EmbedRequest"), "input", {"embeddings": []}),
    "/api/embeddings": (Late(f"{_HERE}.request:EmbeddingsRequest"), "prompt", {"embedding": []}),
}
_LINES = Late(f"{_HERE}.endpoints:loaded_line")


class ModelLoads(CallStage):
    """The stage of Ollama's paths."""

    async def run(self, endpoint: GenerateEndpoint, body: Any, client: Client) -> bool:
        """Answer a request without a prompt."""
        model, prompt, empty = _LOADS[endpoint.path]
        has_prompt = isinstance(body, dict) and (body.get(prompt) or body.get("suffix"))
        if has_prompt or endpoint.has_its_place(client.scope):
            return False
        ignored, state = Ignored(endpoint.judged), endpoint.state
        name = parse(model.load(), body, ignored=ignored).model or served_name(state, None)
        served_name(state, name)
        if state.frontend.state != "ready":
            raise CapacityError(f"The server is {state.frontend.state}: try again later.", retryable=True)
        answer: dict[str, Any] = {"model": name, **empty}
        if endpoint.path in ("/api/chat", "/api/generate"):
            answer = _LINES.load()(name, int(state.unix_time()), empty)
        client.release()
        await send_json(client.send, 200, msgspec.json.encode(answer), endpoint.header_of_ignored(ignored))
        return True
