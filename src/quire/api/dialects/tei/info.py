"""``/info`` of Text Embeddings Inference: what the model gives, and how much a request may hold."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.api.dialects.openai.pooling import MAX_INPUTS
from quire.api.state import ApiState
from quire.http.json_page import json_response

_POOLING = {"last": "last_token"}


class Info:
    """The handler."""

    def __init__(self, state: ApiState) -> None:
        self._state = state

    async def show(self, request: Request) -> Response:
        """The model and its limits (Text Embeddings Inference's form)."""
        model, settings = self._state.model, self._state.settings
        config = settings.model
        return json_response(
            {
                "model_id": model.names[0],
                "model_sha": None,
                "model_dtype": None if config is None else config.dtype,
                "model_type": self._kind(),
                "max_input_length": model.max_model_len,
                "max_batch_tokens": settings.tokens_at_once // 2,
                "max_client_batch_size": MAX_INPUTS,
                "auto_truncate": False,
                "version": settings.version,
            }
        )

    def _kind(self) -> dict[str, Any]:
        """Return what TEI calls the type of a model: an embedding, a reranker with one label, or a classifier."""
        sentence = self._state.model.sentence
        if sentence is None:
            return {"embedding": {"pooling": "last_token"}}
        if sentence.labels:
            names = {str(index): label for index, label in enumerate(sentence.labels)}
            labels = {"id2label": names, "label2id": {label: int(index) for index, label in names.items()}}
            return {"reranker" if len(names) == 1 else "classifier": labels}
        pooling = "splade" if sentence.sparse else _POOLING.get(sentence.pooling, sentence.pooling)
        return {"embedding": {"pooling": pooling}}
