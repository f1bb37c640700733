"""Endpoints that sample nothing: ``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score`` (`quire.engine.pooling`)."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from quire.api.fields import RequestFields
from quire.api.job import Answer, Head, Job, Usage, common_fields, new_head
from quire.api.state import ApiState
from quire.api.text_prompts import parse_prompts
from quire.engine.output import OutputChunk
from quire.engine.pooling import (
    NOTHING_SAMPLED,
    ScoringPrompt,
    embedding,
    likelihood,
    pooled_score,
)
from quire.engine.prompts import too_long
from quire.engine.sentences import cut, pair_prompts, pooling_of, prompt_before, prompt_of_type
from quire.errors import RequestError
from quire.http.call import Call
from quire.http.wire import Boolean, Integer, Text, User, Wire, not_allowed, parse

_encode = msgspec.json.Encoder().encode
_PAIRS_AT_ONCE = 16
MAX_INPUTS = 2048  # OpenAI's
_TEI = "quire.api.dialects.tei.endpoints"
Pair = tuple[str, str]  # query, document
# Scores in the order of the pairs → the answer's own fields.
Written = Callable[[Sequence[float]], Any]
# Chunks and the usage, which counts what was cut → a vector per chunk, as the request wants it.
VectorsOf = Callable[[Sequence[OutputChunk], Usage], list[list[float] | str]]


InputType = Literal[
    "query", "document", "passage", "search_query", "search_document", "classification", "clustering"
]


class PoolingFields(RequestFields):
    """Fields of requests that sample nothing."""

    user: User = ""


class EmbeddingRequest(PoolingFields):
    """Body of ``/v1/embeddings``. ``input`` is checked by `parse_prompts`."""

    input: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Integer | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: Boolean | None = None
    truncate: Boolean = False
    truncate_prompt_tokens: Integer | None = None
    add_special_tokens: Boolean = True
    prompt_name: Text | None = None
    input_type: InputType | None = None


async def embeddings_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a request for embeddings.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(EmbeddingRequest, body, ignored=ignored)
    return await vectors_job(state, call, request, ignored)


async def vectors_job(
    state: ApiState,
    call: Call,
    request: EmbeddingRequest,
    ignored: list[str] | None,
    param: str = "input",
    answer: Callable[[Head, VectorsOf], Answer] | None = None,
) -> Job:
    """Return the job of ``request``, whose input the client calls ``param``.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    head = new_head(state, call, "embd-", request.model)
    special = request.add_special_tokens
    prompts = await parse_prompts(state, request.input, param, add_special_tokens=special)
    check_count(param, len(prompts))
    _check_at_least_1("dimensions", request.dimensions)
    if request.prompt_name is not None and request.input_type is not None:
        raise RequestError(
            "input_type and prompt_name both choose the prompt: send one of them.", param="input_type"
        )
    prompt_name = request.prompt_name or prompt_of_type(state.model, request.input_type)
    lead, sentence = prompt_before(state.model, prompt_name), state.model.sentence
    prompts = [lead + prompt if isinstance(prompt, str) else prompt for prompt in prompts]
    num_cut = 0
    if request.truncate:
        prompts, num_cut = await _cut_to_context(state, prompts)
    normalize = request.normalize if request.normalize is not None else sentence is None or sentence.normalize
    vectors = partial(_vectors, request, normalize, num_cut)
    return Job(
        prompts,
        NOTHING_SAMPLED,
        WholeAnswer(head, partial(_write, vectors)) if answer is None else answer(head, vectors),
        pooling=pooling_of(state.model, request.pooling),
        prompt_param=param,
        **common_fields(request, call, ignored),
    )


def _check_at_least_1(param: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise not_allowed(param, value, "an integer ≥ 1, or null")


def check_count(param: str, count: int) -> None:
    """Reject more inputs than one request may have."""
    if count > MAX_INPUTS:
        raise RequestError(
            f"{param} has {count} elements: at most {MAX_INPUTS} are allowed in one request.", param=param
        )


async def _cut_to_context(
    state: ApiState, prompts: Sequence[str | Sequence[int]]
) -> tuple[list[str | Sequence[int]], int]:
    """Return the beginnings of ``prompts`` that the model can read, and how many tokens are cut off."""
    prompts_within: list[str | Sequence[int]] = []
    num_cut = 0
    for prompt in prompts:
        ids = await state.frontend.prompts.tokenize(prompt) if isinstance(prompt, str) else prompt
        prompts_within.append(cut(ids, state.model.max_model_len, state.frontend.tokenizer))
        num_cut += len(ids) - len(prompts_within[-1])
    return prompts_within, num_cut


def _write(vectors: VectorsOf, chunks: Sequence[OutputChunk], usage: Usage) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": vector}
        for index, vector in enumerate(vectors(chunks, usage))
    ]
    return {"data": data}


def _vectors(
    request: EmbeddingRequest, normalize: bool, num_cut: int, chunks: Sequence[OutputChunk], usage: Usage
) -> list[list[float] | str]:
    usage.truncated_tokens += num_cut
    return [_vector(request, normalize, chunk) for chunk in chunks]


def _vector(request: EmbeddingRequest, normalize: bool, chunk: OutputChunk) -> list[float] | str:
    assert chunk.pooled is not None
    vector = embedding(chunk.pooled, dimensions=request.dimensions, normalize=normalize)
    if request.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return list(vector.tolist())


class _Scores:
    """What is needed to read scores out of the results of a request's prompts."""

    def __init__(self, written: Written) -> None:
        self.num_query_tokens: list[int] = []  # one per pair, for likelihoods
        self.num_truncated = 0
        self._written = written

    def write(self, chunks: Sequence[OutputChunk], usage: Usage) -> Any:
        usage.truncated_tokens += self.num_truncated
        return self._written([self._score(i, chunk) for i, chunk in enumerate(chunks)])

    def _score(self, index: int, chunk: OutputChunk) -> float:
        if chunk.pooled is not None:
            return pooled_score(chunk.pooled)
        assert chunk.prompt_logprobs is not None
        of_query = chunk.prompt_logprobs[-self.num_query_tokens[index] :]
        return likelihood([entry.logprob for entry in of_query if entry is not None])


class ScoringFields(PoolingFields):
    """Fields of both scoring endpoints."""

    scoring: Literal["likelihood", "yes_no"] | None = None
    instruction: Text | None = None
    max_tokens_per_doc: Integer | None = None
    truncate: Boolean = False


class RerankRequest(ScoringFields):
    """Body of ``/v1/rerank``."""

    query: Text
    documents: Annotated[list[Any], Field(description="a list of at least one document", min_length=1)]
    top_n: Integer | None = None
    return_documents: Boolean = True


class ScoreRequest(ScoringFields):
    """Body of ``/v1/score``: one query and one or many documents, or as many of each."""

    text_1: Annotated[str | list[str], Field(description="a string or a list of strings")]
    text_2: Annotated[str | list[str], Field(description="a string or a list of strings")]


class Document(Wire):
    """A document of a rerank request that is an object."""

    text: Text


async def rerank_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a rerank request (Jina's, Cohere's, vLLM's) and make its prompts.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    if isinstance(body, dict) and "texts" in body and "documents" not in body:
        tei: Job = await import_module(_TEI).tei_rerank_job(state, call, body, ignored)
        return tei
    request = parse(RerankRequest, body, ignored=ignored)
    check_count("documents", len(request.documents))
    _check_at_least_1("top_n", request.top_n)
    documents = [_document(item, i, ignored) for i, item in enumerate(request.documents)]
    check_texts("query", [request.query])
    written = partial(_ranking, documents if request.return_documents else None, request.top_n)
    pairs = [(request.query, document) for document in documents]
    return await scoring_job(state, call, request, pairs, "documents", "rerank-", written)


async def score_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a score request (vLLM's) and make its prompts.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(ScoreRequest, body, ignored=ignored)
    queries = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    documents = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    for param, texts in (("text_1", queries), ("text_2", documents)):
        check_count(param, len(texts))
        check_texts(param, texts)
    if len(queries) not in (1, len(documents)):
        raise RequestError(
            f"text_1 has {len(queries)} elements and text_2 has {len(documents)}: send one text_1, or as many of each.",
            param="text_1",
        )
    queries = queries * len(documents) if len(queries) == 1 else queries
    pairs = list(zip(queries, documents, strict=True))
    return await scoring_job(state, call, request, pairs, "text_2", "score-", _score_list)


def _document(item: Any, index: int, ignored: list[str] | None) -> str:
    if isinstance(item, str):
        text = item
    elif isinstance(item, dict):
        prefix = f"documents[{index}]."
        text = parse(Document, item, prefix=prefix, ignored=ignored).text
    else:
        raise not_allowed(f"documents[{index}]", item, "a string, or an object with a text", "invalid_type")
    check_texts(f"documents[{index}]", [text])
    return text


def check_texts(param: str, texts: Sequence[str]) -> None:
    if not texts or not all(texts):
        raise RequestError(f"{param} is empty: send at least one character in each text.", param=param)


async def scoring_job(
    state: ApiState,
    call: Call,
    request: ScoringFields,
    pairs: Sequence[Pair],
    param: str,
    id_prefix: str,
    written: Written,
    *,
    raw: bool = False,
    answer: type[WholeAnswer] | None = None,
) -> Job:
    """Return the job that scores ``pairs``, whose second texts are the field ``param``; ``raw``: by logits.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    frontend, scores = state.frontend, _Scores(written)
    head = new_head(state, call, id_prefix, request.model)
    limit = request.max_tokens_per_doc
    _check_at_least_1("max_tokens_per_doc", limit)
    if limit is not None:
        pairs = [(query, await _cut(state, document, limit, scores)) for query, document in pairs]
    if not request.truncate:
        _check_fit(state, pairs, param)
    render = frontend.prompts.render if frontend.chat_template.names else None
    make = partial(pair_prompts, truncate=request.truncate, raw=raw)
    prompts: list[ScoringPrompt] = []
    for start in range(0, len(pairs), _PAIRS_AT_ONCE):  # a client that left ends the work after each piece
        some, how = pairs[start : start + _PAIRS_AT_ONCE], (request.scoring, request.instruction)
        prompts += await asyncio.to_thread(make, state.model, frontend.tokenizer, some, *how, render)
    scores.num_query_tokens = [prompt.num_query_tokens for prompt in prompts]
    return prompts_job(state, call, request, prompts, param, (answer or WholeAnswer)(head, scores.write))


def prompts_job(
    state: ApiState,
    call: Call,
    request: PoolingFields,
    prompts: Sequence[ScoringPrompt],
    param: str,
    answer: Answer,
) -> Job:
    """Return the job of ``prompts``, which the client calls ``param``."""
    return Job(
        [prompt.token_ids for prompt in prompts],
        prompts[0].sampling,
        answer,
        pooling=prompts[0].pooling,
        poolings=[prompt.pooling for prompt in prompts if prompt.pooling is not None],
        prompt_param=param,
        **common_fields(request, call, None),
    )


def _check_fit(state: ApiState, pairs: Sequence[Pair], param: str) -> None:
    """Reject a pair that the context cannot hold, before any is tokenized."""
    most = state.model.max_model_len
    for query, document in pairs:
        least = state.frontend.tokenizer.min_tokens(len(query) + len(document))
        if least > most:
            error = too_long(f"at least {least}", most)
            raise RequestError(str(error), param=param, code=error.code)


async def _cut(state: ApiState, document: str, limit: int, scores: _Scores) -> str:
    """Return the first ``limit`` tokens of a document; the usage counts the others."""
    ids = await state.frontend.prompts.tokenize(document, add_special_tokens=False)
    if len(ids) <= limit:
        return document
    scores.num_truncated += len(ids) - limit
    return state.frontend.tokenizer.decode(ids[:limit], skip_special_tokens=False)


def _score_list(scores: Sequence[float]) -> dict[str, Any]:
    """vLLM's form: a list in the order of the pairs."""
    return {"data": [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]}


def _ranking(documents: Sequence[str] | None, top_n: int | None, scores: Sequence[float]) -> dict[str, Any]:
    """Jina's and Cohere's form: results from best to worst, ties in the order of the documents."""
    best = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_n]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if documents is not None:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    return {"results": results}


class WholeAnswer(Answer):
    """An answer that is never streamed: the head, the fields that ``write(chunks, usage)`` returns, and the usage."""

    def __init__(self, head: Head, write: Callable[[Sequence[OutputChunk], Usage], Any]) -> None:
        self.head = head
        self._write = write

    def body(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        written = self._write(chunks, usage)
        counts = usage.to_json()
        del counts["completion_tokens"]
        return self._encoded(written, counts)

    def _encoded(self, written: Any, counts: dict[str, Any]) -> bytes:
        return _encode({**self.head.to_json("list"), **written, "usage": counts})
