"""Requests that generate nothing: embeddings, and how well a document answers a query.

A score comes from a generative model's own probabilities, by one of two definitions:

likelihood   exp of the mean log-probability of the query's tokens after the document: query likelihood (Ponte and Croft
             1998), with a language model as in Sachan et al. 2022 (UPR). Works with any model.
yes_no       the model is asked whether the document answers the query; the score is p(yes) / (p(yes) + p(no)) for
             the first token of its answer. For models that follow instructions or are trained for it, such as
             Qwen3-Reranker.

Both lie in 0…1; a larger score is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.request import Pooling, SamplingParams
from quire.text.tokenizer import Tokenizer

Scoring = Literal["likelihood", "yes_no"]
SCORINGS: tuple[Scoring, ...] = get_args(Scoring)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Sampling parameters of a prompt that is only scored.
PROMPT_SCORED = SamplingParams(temperature=0.0, seed=0, max_tokens=0, prompt_logprobs=0, ignore_eos=True)
# Qwen3-Reranker's wording, which other models understand too.
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)


class ScoringPrompt(NamedTuple):
    """The prompt for the score of one pair."""

    token_ids: list[int]
    sampling: SamplingParams
    pooling: Pooling | None
    num_query_tokens: int  # at the end of token_ids; for a likelihood


def pairs_of(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """Return (query, document) pairs: one query with every document, or as many queries as documents.

    Raises:
        RequestError: the numbers do not fit, or a text is empty.
    """
    queries = [queries] if isinstance(queries, str) else list(queries)
    documents = [documents] if isinstance(documents, str) else list(documents)
    if len(queries) not in (1, len(documents)):
        raise RequestError(
            f"There are {len(queries)} queries and {len(documents)} documents: give one query, or as many of each.",
            param="query",
        )
    for param, texts in (("query", queries), ("documents", documents)):
        if not all(texts):
            raise RequestError(f"{param} is empty: give at least one character in each text.", param=param)
    return list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))


def scoring_prompts(
    pairs: Sequence[tuple[str, str]],
    scoring: Scoring,
    instruction: str | None,
    tokenizer: Tokenizer,
    render: Callable[..., str] | None,
) -> list[ScoringPrompt]:
    """Return the prompt of each pair. ``render``: `ChatTemplate.render`, None for a model without a template.

    Raises:
        RequestError: ``scoring`` is unknown, or it does not allow an ``instruction``.
    """
    if scoring not in SCORINGS:
        raise RequestError(
            f"scoring = {scoring!r} is not allowed: it must be one of {', '.join(map(repr, SCORINGS))}.",
            param="scoring",
        )
    if scoring == "likelihood":
        if instruction is not None:
            raise RequestError("instruction is only allowed with scoring = 'yes_no'.", param="instruction")
        of_query = {query: tokenizer.encode(query, add_special_tokens=False) for query, _ in pairs}
        return [_likelihood_prompt(of_query[query], document, tokenizer) for query, document in pairs]
    pooling = Pooling("logprobs", _yes_no_ids(tokenizer))
    prompts = []
    for query, document in pairs:
        scored = (query, document, INSTRUCTION if instruction is None else instruction)
        if render is not None:
            text = render(_messages(*scored), variables={"enable_thinking": False})
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(_plain_text(*scored))
        prompts.append(ScoringPrompt(ids, NOTHING_SAMPLED, pooling, 0))
    return prompts


def likelihood(logprobs: Sequence[float]) -> float:
    """Return the score, given the log-probabilities of the query's tokens."""
    return math.exp(math.fsum(logprobs) / len(logprobs))


def _messages(query: str, document: str, instruction: str) -> list[dict[str, str]]:
    """Return the conversation that the chat template turns into a prompt."""
    question = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return [{"role": "system", "content": _JUDGE}, {"role": "user", "content": question}]


def _plain_text(query: str, document: str, instruction: str) -> str:
    """Return the prompt for a model that has no chat template."""
    system, user = _messages(query, document, instruction)
    return f"{system['content']}\n\n{user['content']}\n\nAnswer:\n"


def _yes_no_ids(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the first tokens of "yes" and of "no".

    Raises:
        RequestError: both words begin with the same token.
    """
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    if yes == no:
        raise RequestError(
            "scoring = 'yes_no' does not work with this model: its tokenizer begins both words with the same token. "
            "Use 'likelihood'.",
            param="scoring",
        )
    return yes, no


def yes_no(pooled: Sequence[float]) -> float:
    """Return the score, given the log-probabilities of the two tokens."""
    yes, no = pooled
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


def pooled_score(pooled: Sequence[float]) -> float:
    """Return the one score of a cross-encoder, else that of `yes_no`."""
    return pooled[0] if len(pooled) == 1 else yes_no(pooled)


def _likelihood_prompt(query_ids: list[int], document: str, tokenizer: Tokenizer) -> ScoringPrompt:
    # Tokenized apart from the document, so that the query's tokens are known.
    if not query_ids:
        raise RequestError("query has no tokens: give another text.", param="query")
    before = tokenizer.encode(f"Document:\n{document}\n\nQuery:\n")
    return ScoringPrompt(before + query_ids, PROMPT_SCORED, None, len(query_ids))


# Sampling parameters of a request with a `Pooling`, which samples nothing.
NOTHING_SAMPLED = SamplingParams(temperature=0.0, seed=0, max_tokens=1, ignore_eos=True)


def embedding(
    pooled: Sequence[float], *, dimensions: int | None = None, normalize: bool = True
) -> NDArray[np.float32]:
    """Return the first ``dimensions`` elements of ``pooled`` (None: all), scaled to Euclidean length one.

    Models with Matryoshka embeddings are trained for cutting before scaling (Kusupati et al. 2022).

    Raises:
        RequestError: the vector has fewer elements than ``dimensions``.
    """
    if dimensions is not None and not 1 <= dimensions <= len(pooled):
        raise RequestError(
            f"dimensions = {dimensions} is not allowed: the vectors of this model have {len(pooled)}; ask for "
            f"1…{len(pooled)}.",
            param="dimensions",
        )
    vector = np.array(pooled[:dimensions], np.float64)
    length = float(np.sqrt(np.square(vector).sum()))
    if normalize and length > 0.0:
        vector /= length
    return vector.astype(np.float32)
