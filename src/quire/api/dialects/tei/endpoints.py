"""Requests to encoders in the forms of Text Embeddings Inference, Cohere's ``/v2/embed`` and vLLM's ``/classify``.

They are thin: the body becomes one of OpenAI's (`quire.api.dialects.openai.pooling`), and the answer is written as
those servers do, TEI's as a bare list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from quire.api.dialects.openai.pooling import (
    EmbeddingRequest,
    PoolingFields,
    ScoringFields,
    VectorsOf,
    WholeAnswer,
    _encode,
    check_count,
    check_texts,
    prompts_job,
    scoring_job,
    vectors_job,
)
from quire.api.job import Answer, Head, Job, Usage, new_head
from quire.api.state import ApiState
from quire.engine.output import OutputChunk
from quire.engine.pooling import NOTHING_SAMPLED, ScoringPrompt
from quire.engine.sentences import cut, label_prompts, prompt_before, rows_of, sparse_weights
from quire.http.call import Call
from quire.http.wire import Boolean, Integer, Text, Wire, not_allowed, parse

Inputs = Annotated[Any, Field(description="a string, a list of token ids, or a list of either")]


class TeiEmbedRequest(PoolingFields):
    """Body of ``/embed``."""

    inputs: Inputs = None
    normalize: Boolean = True
    truncate: Boolean = False
    prompt_name: Text | None = None
    dimensions: Integer | None = None


class TokenRowsRequest(PoolingFields):
    """Body of ``/embed_all`` and ``/embed_sparse``."""

    inputs: Annotated[str | list[str], Field(description="a string or a list of strings")]
    truncate: Boolean = False
    prompt_name: Text | None = None


class TeiRerankRequest(PoolingFields):
    """Body of ``/rerank`` with ``texts``."""

    query: Text
    texts: Annotated[list[str], Field(description="a list of at least one string", min_length=1)]
    raw_scores: Boolean = False
    return_text: Boolean = False
    truncate: Boolean = False


class PredictRequest(PoolingFields):
    """Body of ``/predict``."""

    inputs: Annotated[Any, Field(description="a string, a pair of strings, or a list of texts and pairs")] = (
        None
    )
    raw_scores: Boolean = False
    truncate: Boolean = False


class SimilarityInputs(Wire):
    """``inputs`` of ``/similarity``."""

    source_sentence: Text
    sentences: Annotated[list[str], Field(description="a list of at least one string", min_length=1)]


class SimilarityRequest(PoolingFields):
    """Body of ``/similarity``."""

    inputs: Annotated[dict[str, Any], Field(description="an object with source_sentence and sentences")]


class CohereEmbedRequest(PoolingFields):
    """Body of ``/v2/embed``."""

    texts: Annotated[list[str], Field(description="a list of at least one string", min_length=1)]
    input_type: Literal["search_query", "search_document", "classification", "clustering", "image"] | None = (
        None
    )
    embedding_types: Annotated[
        list[Literal["float", "base64"]] | None, Field(description="a list of 'float' and 'base64'")
    ] = None
    truncate: Literal["NONE", "END"] = "END"
    output_dimension: Integer | None = None


class ClassifyRequest(PoolingFields):
    """Body of ``/classify``."""

    input: Annotated[str | list[str], Field(description="a string or a list of strings")]
    truncate: Boolean = False


class BareAnswer(WholeAnswer):
    """An answer that is what ``write`` returns, without a head."""

    def _encoded(self, written: Any, counts: dict[str, Any]) -> bytes:
        return _encode(written)


async def tei_embed_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of ``/embed``.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(TeiEmbedRequest, body, ignored=ignored)
    shared = ("model", "priority", "cache_salt", "request_id", "user", "normalize", "truncate", "dimensions")
    fields = {name: getattr(request, name) for name in (*shared, "prompt_name")}
    return await vectors_job(
        state, call, EmbeddingRequest(input=request.inputs, **fields), ignored, "inputs", BareAnswer
    )


async def token_rows_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of ``/embed_all``: a row per token of each text, for late interaction.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    return await _rows_job(state, call, body, ignored, "tokens", RowsAnswer)


async def sparse_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of ``/embed_sparse``: a weight per token of the vocabulary for each text.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """

    def answer(head: Head) -> Answer:
        return BareAnswer(head, _sparse_vectors)

    return await _rows_job(state, call, body, ignored, "sparse", answer)


def _sparse_vectors(chunks: Sequence[OutputChunk], usage: Usage) -> list[list[dict[str, float]]]:
    return [
        [{"index": token_id, "value": weight} for token_id, weight in sparse_weights(chunk.pooled or ())]
        for chunk in chunks
    ]


async def _rows_job(
    state: ApiState,
    call: Call,
    body: Any,
    ignored: list[str] | None,
    kind: Literal["tokens", "sparse"],
    answer: Callable[[Head], Answer],
) -> Job:
    request = parse(TokenRowsRequest, body, ignored=ignored)
    pooling = rows_of(state.model, kind)
    texts = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    check_count("inputs", len(texts))
    check_texts("inputs", texts)
    lead, limit = prompt_before(state.model, request.prompt_name), state.model.max_model_len
    prompts = []
    for text in texts:
        ids = await state.frontend.prompts.tokenize(lead + text)
        ids = cut(ids, limit, state.frontend.tokenizer) if request.truncate else ids
        prompts.append(ScoringPrompt(list(ids), NOTHING_SAMPLED, pooling, 0))
    head = new_head(state, call, "embd-", request.model)
    return prompts_job(state, call, request, prompts, "inputs", answer(head))


async def root_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check a body that is sent to the address alone: it is read as the kind of the model says.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    sentence = state.model.sentence
    if sentence is not None and sentence.labels:
        read = tei_rerank_job if len(sentence.labels) == 1 else predict_job
    else:
        read = sparse_job if sentence is not None and sentence.sparse else tei_embed_job
    return await read(state, call, body, ignored)


class RowsAnswer(Answer):
    """A list of rows per text."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def body(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        rows = []
        for chunk, ids in zip(chunks, prompts, strict=True):
            assert chunk.pooled is not None
            rows.append(np.array(chunk.pooled, np.float32).reshape(len(ids), -1).tolist())
        return _encode(rows)


async def tei_rerank_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of ``/rerank`` with ``texts``.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(TeiRerankRequest, body, ignored=ignored)
    check_count("texts", len(request.texts))
    check_texts("query", [request.query])
    check_texts("texts", request.texts)
    written = partial(_tei_ranking, request.texts if request.return_text else None)
    pairs = [(request.query, text) for text in request.texts]
    fields = {name: getattr(request, name) for name in ("model", "priority", "cache_salt", "request_id")}
    scoring = ScoringFields(truncate=request.truncate, user=request.user, **fields)
    return await scoring_job(
        state, call, scoring, pairs, "texts", "rerank-", written, raw=request.raw_scores, answer=BareAnswer
    )


def _tei_ranking(texts: Sequence[str] | None, scores: Sequence[float]) -> list[dict[str, Any]]:
    """From best to worst, ties in the order of the texts."""
    best = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [{"index": i, "score": scores[i], **({} if texts is None else {"text": texts[i]})} for i in best]


async def predict_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of ``/predict``: labels of texts or pairs, from best to worst.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(PredictRequest, body, ignored=ignored)
    inputs, is_batch = _texts_or_pairs(request.inputs)
    return await _labels_job(
        state,
        call,
        request,
        inputs,
        "inputs",
        partial(_predicted, is_batch),
        BareAnswer,
        raw=request.raw_scores,
    )


def _texts_or_pairs(value: Any) -> tuple[list[tuple[str, ...]], bool]:
    """Return texts and pairs, and whether there is a list of them."""
    allowed = "a string, a pair of strings, or a list of lists of one or two strings"
    is_batch = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    items = value if is_batch else [[value] if isinstance(value, str) else value]
    for item in items:
        right = isinstance(item, list) and 1 <= len(item) <= 2 and all(isinstance(text, str) for text in item)
        if not right:
            raise not_allowed("inputs", value, allowed, "invalid_type")
        check_texts("inputs", item)
    check_count("inputs", len(items))
    return [tuple(item) for item in items], is_batch


def _predicted(is_batch: bool, labels: Sequence[str], rows: Sequence[Sequence[float]], usage: Usage) -> Any:
    ranked = []
    for row in rows:
        best = sorted(range(len(row)), key=lambda i: -row[i])
        ranked.append([{"score": row[i], "label": labels[i]} for i in best])
    return ranked if is_batch else ranked[0]


async def classify_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of ``/classify`` (vLLM's).

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(ClassifyRequest, body, ignored=ignored)
    texts = [request.input] if isinstance(request.input, str) else request.input
    check_count("input", len(texts))
    check_texts("input", texts)
    return await _labels_job(
        state, call, request, [(text,) for text in texts], "input", _classes, WholeAnswer
    )


def _classes(labels: Sequence[str], rows: Sequence[Sequence[float]], usage: Usage) -> dict[str, Any]:
    data = []
    for index, row in enumerate(rows):
        best = max(range(len(row)), key=row.__getitem__)
        entry = {"index": index, "label": labels[best], "probs": list(row), "num_classes": len(row)}
        data.append(entry)
    return {"data": data}


async def _labels_job(
    state: ApiState,
    call: Call,
    request: PredictRequest | ClassifyRequest,
    inputs: Sequence[tuple[str, ...]],
    param: str,
    write: Callable[[Sequence[str], Sequence[Sequence[float]], Usage], Any],
    answer: type[WholeAnswer],
    *,
    raw: bool = False,
) -> Job:
    head, model = new_head(state, call, "classify-", request.model), state.model
    make = partial(label_prompts, truncate=request.truncate, raw=raw)
    prompts = await asyncio.to_thread(make, model, state.frontend.tokenizer, inputs)

    def written(chunks: Sequence[OutputChunk], usage: Usage) -> Any:
        assert model.sentence is not None
        return write(model.sentence.labels, [chunk.pooled or () for chunk in chunks], usage)

    return prompts_job(state, call, request, prompts, param, answer(head, written))


async def similarity_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of ``/similarity``: cosines of a text and others.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(SimilarityRequest, body, ignored=ignored)
    inputs = parse(SimilarityInputs, request.inputs, prefix="inputs.", ignored=ignored)
    check_texts("inputs.source_sentence", [inputs.source_sentence])
    check_texts("inputs.sentences", inputs.sentences)
    texts = [inputs.source_sentence, *inputs.sentences]
    fields = {
        name: getattr(request, name) for name in ("model", "priority", "cache_salt", "request_id", "user")
    }
    wanted = EmbeddingRequest(input=texts, normalize=True, **fields)
    return await vectors_job(state, call, wanted, ignored, "inputs.sentences", _similarities)


def _similarities(head: Head, vectors: VectorsOf) -> Answer:
    def write(chunks: Sequence[OutputChunk], usage: Usage) -> list[float]:
        source, *others = (np.array(vector, np.float64) for vector in vectors(chunks, usage))
        return [float(np.multiply(source, other).sum()) for other in others]

    return BareAnswer(head, write)


async def cohere_embed_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of ``/v2/embed`` (Cohere's).

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(CohereEmbedRequest, body, ignored=ignored)
    if request.input_type == "image":
        raise not_allowed("input_type", request.input_type, "a kind of texts, since vectors are of texts")
    kinds = request.embedding_types or ["float"]
    wanted = EmbeddingRequest(
        input=request.texts, input_type=request.input_type,
        truncate=request.truncate == "END", dimensions=request.output_dimension, model=request.model,
        priority=request.priority, cache_salt=request.cache_salt, request_id=request.request_id, user=request.user,
        encoding_format="base64" if kinds == ["base64"] else "float",
    )  # fmt: skip
    if len(kinds) > 1:
        raise not_allowed("embedding_types", kinds, "one of ['float'] and ['base64']")
    answer = partial(_cohere_answer, request.texts, kinds[0])
    return await vectors_job(state, call, wanted, ignored, "texts", answer)


def _cohere_answer(texts: Sequence[str], kind: str, head: Head, vectors: VectorsOf) -> Answer:
    def write(chunks: Sequence[OutputChunk], usage: Usage) -> dict[str, Any]:
        embeddings = vectors(chunks, usage)
        billed = {"input_tokens": usage.prompt_tokens}
        return {
            "id": head.id, "model": head.model, "response_type": "embeddings_by_type", "embeddings": {kind: embeddings},
            "texts": texts, "meta": {"api_version": {"version": "2"}, "billed_units": billed},
            "usage": {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens},
        }  # fmt: skip

    return BareAnswer(head, write)
