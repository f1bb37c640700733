"""The outputs of `quire.LLM`, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from quire.engine.best_of import choose_best
from quire.engine.output import OutputChunk, RequestOutputState
from quire.errors import StepError
from quire.request import FinishReason, TokenLogprobs
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at one position: log-probability under the raw logits, rank (1 is the most likely), text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None  # sum over token_ids, with `SamplingParams.logprobs`
    logprobs: list[dict[int, Logprob]] | None  # per position: the sampled token first, then the alternatives
    finish_reason: FinishReason | None  # equals "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop token id or the stop string; None for EOS
    error: str | None = None  # with finish_reason "error"


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt."""

    request_id: str
    prompt: str | None  # None if the prompt was given as ids
    prompt_token_ids: tuple[int, ...]
    outputs: list[CompletionOutput]  # key: index
    # Given, or chosen for the request; the same seed gives the same text again.
    seed: int
    num_cached_tokens: int = 0  # prompt tokens that were in the prefix cache
    # Per prompt token, as `CompletionOutput.logprobs`, with `SamplingParams.prompt_logprobs`; None for the first token.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    pooled: tuple[float, ...] | None = None  # for `LLM.embed` and `LLM.score`: the model's output
    finished: bool = True


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: tuple[int, ...]
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """A score, 0…1."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of one pair of texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: tuple[int, ...]
    finished: bool = True


def request_output(
    state: RequestOutputState, prompt: str | None, chunks: Sequence[OutputChunk], tokenizer: Tokenizer
) -> RequestOutput:
    """Return the output of a finished request. ``wholes``: one merged chunk per sample."""
    request = state.request
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[_completion(chunk, tokenizer) for chunk in choose_best(chunks, request.sampling)],
        seed=request.sampling.seed or 0,
        num_cached_tokens=state.timing.num_cached_tokens,
        prompt_logprobs=_prompt_tables(chunks[0], tokenizer),
        pooled=chunks[0].pooled,
    )


def _completion(chunk: OutputChunk, tokenizer: Tokenizer) -> CompletionOutput:
    """Return the merged chunk of one sample in vLLM's form."""
    logprobs = chunk.logprobs
    return CompletionOutput(
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in logprobs),
        logprobs=None if logprobs is None else [_table(entry, tokenizer) for entry in logprobs],
        finish_reason=chunk.finish_reason,
        stop_reason=chunk.stop_reason,
        error=chunk.error,
    )


def _prompt_tables(chunk: OutputChunk, tokenizer: Tokenizer) -> list[dict[int, Logprob] | None] | None:
    """Return `RequestOutput.prompt_logprobs`."""
    if chunk.prompt_logprobs is None:
        return None
    return [None if entry is None else _table(entry, tokenizer) for entry in chunk.prompt_logprobs]


def _table(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    def text(token_id: int) -> str:
        return tokenizer.decode([token_id], skip_special_tokens=False, continues=True)

    table = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(
        zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1
    ):
        table.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
    return table


_POOLING = "quire.engine.pooling"  # loaded with the first vector or score


def embedded(output: RequestOutput, *, dimensions: int | None, normalize: bool) -> EmbeddingRequestOutput:
    """Return the vector of a prompt.

    Raises:
        RequestError, StepError: as `LLM.embed`.
    """
    _raise_failure(output)
    assert output.pooled is not None
    vector = import_module(_POOLING).embedding(output.pooled, dimensions=dimensions, normalize=normalize)
    return EmbeddingRequestOutput(
        output.request_id, EmbeddingOutput(vector.tolist()), output.prompt_token_ids
    )


def scored(output: RequestOutput, num_query_tokens: int) -> ScoringRequestOutput:
    """Return the score of a pair.

    Raises:
        StepError: as `LLM.score`.
    """
    _raise_failure(output)
    pooling = import_module(_POOLING)
    if output.pooled is not None:
        score = pooling.pooled_score(output.pooled)
    else:
        assert output.prompt_logprobs is not None
        query_ids = output.prompt_token_ids[-num_query_tokens:]
        tables = output.prompt_logprobs[-num_query_tokens:]
        logprobs = [t[i].logprob for t, i in zip(tables, query_ids, strict=True) if t is not None]
        score = pooling.likelihood(logprobs)
    return ScoringRequestOutput(output.request_id, ScoringOutput(score), output.prompt_token_ids)


def _raise_failure(output: RequestOutput) -> None:
    error = output.outputs[0].error
    if error is not None:
        raise StepError(error)
