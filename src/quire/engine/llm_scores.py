"""What `LLM.embed` and `LLM.score` return, from the engine's outputs."""

from __future__ import annotations

from quire.engine.embedding import embedding
from quire.engine.results import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.engine.scoring import likelihood, yes_no
from quire.errors import StepError


def embedded(output: RequestOutput, *, dimensions: int | None, normalize: bool) -> EmbeddingRequestOutput:
    """Return the vector of a prompt.

    Raises:
        RequestError, StepError: as `LLM.embed`.
    """
    _check(output)
    assert output.pooled is not None
    vector = embedding(output.pooled, dimensions=dimensions, normalize=normalize)
    return EmbeddingRequestOutput(
        output.request_id, EmbeddingOutput(vector.tolist()), output.prompt_token_ids
    )


def scored(output: RequestOutput, num_query_tokens: int) -> ScoringRequestOutput:
    """Return the score of a pair.

    Raises:
        StepError: as `LLM.score`.
    """
    _check(output)
    if output.pooled is not None:
        score = yes_no(output.pooled)
    else:
        assert output.prompt_logprobs is not None
        query_ids = output.prompt_token_ids[-num_query_tokens:]
        tables = output.prompt_logprobs[-num_query_tokens:]
        score = likelihood([t[i].logprob for t, i in zip(tables, query_ids, strict=True) if t is not None])
    return ScoringRequestOutput(output.request_id, ScoringOutput(score), output.prompt_token_ids)


def _check(output: RequestOutput) -> None:
    error = output.outputs[0].error
    if error is not None:
        raise StepError(error)
