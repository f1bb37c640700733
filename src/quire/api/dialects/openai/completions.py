"""``/v1/completions``: from the wire to a `Job`, and its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from quire.api.answer_form import structured_outputs
from quire.api.dialects.openai.choices import Choices, ChoicesAnswer
from quire.api.dialects.openai.fields import CompletionRequest
from quire.api.fields import FORM_FIELDS
from quire.api.job import (
    Job,
    common_fields,
    given_sampling,
    new_head,
    output_limit,
    sampling_params,
    stream_options,
)
from quire.api.state import ApiState
from quire.api.text_prompts import filled_in, parse_prompts
from quire.api.token_logprobs import CompletionLogprobs, TokenNames, prompt_logprobs
from quire.engine.output import OutputChunk
from quire.errors import RequestError
from quire.http.call import Call
from quire.http.wire import parse

DEFAULT_MAX_TOKENS = 16  # OpenAI's
_encode = msgspec.json.Encoder().encode


async def completion_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a text completion.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(CompletionRequest, body, ignored=ignored)
    head = new_head(state, call, "cmpl-", request.model)
    options = stream_options(request, ignored)
    prompts = await parse_prompts(state, request.prompt, add_special_tokens=request.add_special_tokens)
    sampling = sampling_params(
        given_sampling(_echoing(request)),
        state.model.generation_defaults,
        max_tokens=output_limit(DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens),
        logprobs=request.logprobs,
        form=None
        if request.model_fields_set.isdisjoint(FORM_FIELDS)
        else structured_outputs(request, ignored),
    )
    offsets: list[int] = []
    # Offsets count from the beginning of the prompt, as at OpenAI.
    if request.logprobs is not None and not request.echo:
        tokenizer = state.frontend.tokenizer
        offsets = [len(p) if isinstance(p, str) else len(tokenizer.decode(p)) for p in prompts]
    if request.suffix:
        if request.echo:
            raise RequestError("echo is not supported with suffix.", param="echo")
        prompts, sampling = await filled_in(state, prompts, request.suffix, sampling)
    choices = CompletionChoices(
        TokenNames(state.frontend.tokenizer, as_ids=request.return_tokens_as_token_ids),
        num_logprobs=request.logprobs,
        with_ids=request.return_token_ids,
        num_prompt_logprobs=request.prompt_logprobs,
        echo=request.echo,
        offsets=offsets,
        n=sampling.n,
    )
    return Job(
        prompts,
        sampling,
        ChoicesAnswer(head, choices, options, sampling.n),
        continues=True,
        echo=request.echo,
        **common_fields(request, call, ignored),
    )


def _echoing(request: CompletionRequest) -> CompletionRequest:
    """An echo with log-probabilities, or of the prompt alone (max_tokens = 0), needs those of the prompt."""
    if not request.echo or (request.logprobs is None and request.max_tokens != 0):
        return request
    most = max(request.logprobs or 0, request.prompt_logprobs or 0)
    return request.model_copy(update={"prompt_logprobs": most})


@dataclass(slots=True)
class CompletionChoices(Choices):
    """Choices of ``/v1/completions``, each with the fields of its own prompt.

    ``num_logprobs``: alternatives beside each token, also of an echoed prompt.
    """

    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    names: TokenNames
    num_logprobs: int | None
    with_ids: bool
    num_prompt_logprobs: int | None = None
    echo: bool = False
    offsets: Sequence[int] = ()  # characters of each prompt, where it is not echoed
    n: int = 1
    _renderers: dict[int, CompletionLogprobs] = field(default_factory=dict)

    def opening(self, index: int, echo: str) -> bytes | None:
        """Return the choice with the prompt's text, if it is echoed."""
        if not echo:
            return None
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (index, _encode(echo))

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        """Return the choice object of one chunk; None if there is nothing to show yet."""
        plain = chunk.finish_reason is None and chunk.prompt_logprobs is None
        if plain and self.num_logprobs is None and not self.with_ids:
            return self.opening(index, chunk.text)
        return _encode(self._choice(index, chunk))

    def full_choice(self, index: int, chunk: OutputChunk, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the choice object of a whole answer, given as one chunk."""
        ids = {"prompt_token_ids": prompt_token_ids} if self.with_ids else {}
        return {**self._choice(index, chunk), **ids}

    def _choice(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        value: dict[str, Any] = {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(index, chunk),
            "finish_reason": chunk.finish_reason,
            **prompt_logprobs(chunk, self.num_prompt_logprobs, self.names),
        }
        if chunk.finish_reason is not None:
            value["stop_reason"] = chunk.stop_reason
        if self.with_ids:
            value["token_ids"] = chunk.token_ids
        return value

    def _logprobs(self, index: int, chunk: OutputChunk) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        renderer = self._renderers.get(index)
        if renderer is None:
            offset = self.offsets[index // self.n] if self.offsets else 0
            renderer = self._renderers[index] = CompletionLogprobs(self.names, offset)
        echoed = None
        if self.echo and chunk.prompt_logprobs is not None:
            assert chunk.prompt_token_ids is not None
            echoed = renderer.echo(chunk.prompt_logprobs, chunk.prompt_token_ids, self.num_logprobs)
        return renderer.render(chunk.logprobs or (), echoed)
