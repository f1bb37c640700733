"""``/v1/embeddings``: any decoder's last or mean hidden state as a vector."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from quire.api.completions import parse_prompts
from quire.api.job import Job
from quire.api.protocol import RequestFields
from quire.api.replies import Usage, WholeAnswer, new_head
from quire.api.state import ApiState
from quire.engine.output import OutputChunk
from quire.engine.pooling import NOTHING_SAMPLED, embedding
from quire.errors import RequestError
from quire.http.wire import Boolean, Integer, Text, parse
from quire.request import Pooling

MAX_INPUTS = 2048  # OpenAI's


class PoolingFields(RequestFields):
    """What requests have in common that draw no tokens."""

    user: Text = ""


class EmbeddingRequest(PoolingFields):
    """Body of ``/v1/embeddings``. ``input`` is checked by `quire.api.completions.parse_prompts`."""

    input: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Integer | None = None
    pooling: Literal["last", "mean"] = "last"
    normalize: Boolean = True
    truncate_prompt_tokens: Integer | None = None
    add_special_tokens: Boolean = True


async def embeddings_job(state: ApiState, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a request for embeddings.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(EmbeddingRequest, body, ignored=ignored)
    model = state.check_model(request.model)
    prompts = parse_prompts(request.input, "input")
    check_count("input", len(prompts))
    if request.dimensions is not None and request.dimensions < 1:
        raise RequestError(
            f"dimensions = {request.dimensions} is not allowed: it must be an integer ≥ 1, or null.",
            param="dimensions",
        )
    if not request.add_special_tokens:
        tokenize = state.frontend.tokenize
        prompts = [await tokenize(p, add_special_tokens=False) if isinstance(p, str) else p for p in prompts]
    return Job(
        prompts=prompts,
        sampling=NOTHING_SAMPLED,
        answer=WholeAnswer(new_head(state, "embd-", model), partial(_write, request)),
        priority=request.priority,
        cache_salt=request.cache_salt,
        tenant=request.user,
        client_request_id=request.request_id,
        truncate_to=request.truncate_prompt_tokens,
        pooling=Pooling(request.pooling),
        prompt_param="input",
    )


def check_count(param: str, count: int) -> None:
    """Refuse more inputs than one request may have."""
    if count > MAX_INPUTS:
        raise RequestError(
            f"{param} has {count} elements: at most {MAX_INPUTS} are allowed in one request.", param=param
        )


def _write(request: EmbeddingRequest, chunks: Sequence[OutputChunk], usage: Usage) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(request, chunk)}
        for index, chunk in enumerate(chunks)
    ]
    return {"data": data}


def _vector(request: EmbeddingRequest, chunk: OutputChunk) -> list[float] | str:
    assert chunk.pooled is not None
    vector = embedding(chunk.pooled, dimensions=request.dimensions, normalize=request.normalize)
    if request.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return list(vector.tolist())
