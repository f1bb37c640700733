"""The block that ends a server's start: its address, what is served, and a request to try."""

from __future__ import annotations

import json
from typing import Any

from quire.units import GIB


def start_up_report(
    url: str, info: Any, model: Any, seconds: float, note: str | None = None, weights: str = ""
) -> str:
    """Return the block. ``info``: the `EngineInfo`; ``model``: the `ModelInfo`; ``weights``: lines on their formats.

    ``note``: why the kernels are slow. Which kernels run is in `quire doctor`, and in the log from --log-level debug.
    """
    slow = f"         {note}\n" if note else ""
    is_exact = info.determinism == "exact"
    exact = "yes: the same bits alone and in any batch" if is_exact else "no: see --batch-invariant"
    cache = f"cache    {info.num_kv_tokens:,} tokens in up to {info.kv_bytes / GIB:.2f} GiB\n"
    path, body = first_request(model)
    return (
        f"ready    in {seconds:.1f} s on {url}\n"
        f"model    {model.names[0]}, {info.weight_bytes / GIB:.2f} GiB of weights\n{weights}"
        f"exact    {exact}\n"
        f"{slow}{cache if model.writes_text else ''}"
        f"stop     Ctrl-C\n\n"
        f"  curl {url}{path} -H 'content-type: application/json' \\\n"
        f"    -d '{json.dumps(body)}'\n"
    )


def first_request(model: Any) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request that the model answers."""
    body = {"model": model.names[0]}
    sentence = model.sentence
    if sentence is None:
        messages = [{"role": "user", "content": "Tell me a story."}]
        return "/v1/chat/completions", {**body, "messages": messages, "max_tokens": 64}
    if sentence.labels or sentence.yes_no:
        documents = ["Cats purr.", "Dogs bark."]
        return "/v1/rerank", {**body, "query": "Which animal barks?", "documents": documents}
    return "/v1/embeddings", {**body, "input": "A cat purrs."}
