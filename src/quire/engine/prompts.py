"""Prompts on the API side: conversations and texts to token ids, and token ids with `SamplingParams` to a `Request`.

`prepare_request` is the one place that resolves defaults and checks limits: the online frontend and the offline `LLM`
both call it, so both reject the same requests with the same words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from quire.errors import ModelLoadError, RequestError, clip
from quire.http.limits import TEXT_CHARACTERS, too_many
from quire.request import NO_TERMS, Adapter, Pooling, Request, SamplingParams, Terms, TokenEvent
from quire.spans import salted
from quire.text.chat_template import ChatTemplate, over_limit
from quire.text.tokenizer import INLINE_CHARS, Tokenizer

if TYPE_CHECKING:
    from quire.engine.helper_pool import Head, HelperPool
    from quire.engine.large_input import LongTexts
    from quire.pooling import SentenceSpec
    from quire.vision_spec import VisionSpec

T = TypeVar("T")
INLINE_ELEMENTS = 256  # messages or texts; a few times as many tokens
_ERRORS, _SENTENCES = "quire.engine.over_context", "quire.engine.sentences"


class Begun(NamedTuple):
    """An answer that has begun elsewhere, or has a name there: what goes on behind it must be equal."""

    seed: int | None = None  # where the sampling gives none
    delivered: Sequence[TokenEvent] = ()  # events that its client has
    elapsed_s: float = 0.0  # since the request arrived there


NOT_BEGUN = Begun()


def prepare_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    model: ModelInfo,
    tokenizer: Tokenizer,
    *,
    arrival_s: float,
    seed: int,
    terms: Terms = NO_TERMS,
    grammar: str | None = None,
    adapter: Adapter | None = None,
    pooling: Pooling | None = None,
) -> Request:
    """Return the request as the core sees it. ``seed`` is used where ``sampling`` gives none.

    ``grammar`` is `GrammarChecker`'s result for ``sampling.structured_outputs``.

    Raises:
        RequestError: names the field; for a length, the three numbers (prompt, max_tokens, limit).
    """
    assert (grammar is None) == (sampling.structured_outputs is None)
    if pooling is None and not model.writes_text:
        raise import_module(_SENTENCES).writes_no_text(model)
    ids, limit = tuple(prompt_token_ids), model.max_model_len
    max_tokens = _max_tokens(len(ids), sampling, limit, prompt_only=pooling is not None)
    check_token_ids("prompt", ids, model.vocab_size)
    if not ids:
        raise RequestError("prompt is empty: send at least one token.", param="prompt")
    bad_words, budget = bad_words_ids(sampling.bad_words, tokenizer), sampling.thinking_budget
    for name, named in (
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words", [token_id for word in bad_words for token_id in word]),
        ("thinking_budget", () if budget is None else (budget.begin_id, budget.end_id)),
    ):
        check_token_ids(name, tuple(named), model.vocab_size)
    resolved = sampling.resolve(
        seed=seed if sampling.seed is None else sampling.seed,
        max_tokens=0 if terms.kv is not None and terms.kv.gives else max_tokens,
        eos_token_ids=model.eos_token_ids,
        bad_words_token_ids=bad_words,
    )
    spans = getattr(prompt_token_ids, "spans", ())
    spans = salted(spans, terms.cache_salt) if spans else spans
    return Request(
        request_id, ids, resolved, arrival_s, terms, adapter, grammar, pooling=pooling, spans=spans
    )


def check_token_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise `RequestError` that names ``param`` and the first id outside the vocabulary."""
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size):
        return
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} holds the token id {clip(token_id)}: the model's ids are 0…{vocab_size - 1}.",
                param=param,
            )


def too_long(num_tokens: str, limit: int) -> RequestError:
    """Return the error for a prompt of more tokens than the context, ``limit``; ``num_tokens`` may be "at least N"."""
    return RequestError(
        f"The prompt has {num_tokens} tokens, but the context of this model is {limit} tokens: shorten the prompt to "
        f"at most {limit}.",
        param="prompt",
        code="context_length_exceeded",
    )


def _max_tokens(num_prompt_tokens: int, sampling: SamplingParams, limit: int, *, prompt_only: bool) -> int:
    room, wanted = limit - num_prompt_tokens, sampling.max_tokens
    if prompt_only or wanted == 0:
        if room >= 0:
            return 1 if prompt_only else 0
    elif room >= 1 and (sampling.min_tokens if wanted is None else wanted) <= room:
        return room if wanted is None else wanted
    raise import_module(_ERRORS).over_context(num_prompt_tokens, sampling, limit, prompt_only=prompt_only)


@lru_cache(32)  # a request for many prompts asks for each of them
def bad_words_ids(words: tuple[str, ...], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the id sequences that spell ``words``, at the start of a text and after a space.

    Inside a text, a word usually follows a space, which most vocabularies include in the word's token.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.strip() or word
        for spelled in (bare, " " + bare):
            ids = tuple(tokenizer.encode(spelled, add_special_tokens=False))
            if ids:
                sequences[ids] = None
    return tuple(sequences)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Names, limits and defaults of the served model, as the API side knows them. Torch-free."""

    names: tuple[str, ...]  # answers carry the first
    max_model_len: int  # prompt + output, tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]  # generation_config.json and the tokenizer together
    # By the names of `SamplingParams`: temperature, top_p …
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    determinism: str = "exact"  # see `EngineConfig`
    # How a text becomes a vector, and whether the model writes texts: a decoder.
    sentence: SentenceSpec | None = None
    writes_text: bool = True
    vision: VisionSpec | None = None  # None: the model takes no images

    def sampling(self, **fields: Any) -> SamplingParams:
        """Return `SamplingParams` in which what is ``given`` replaces the model's defaults.

        Raises:
            RequestError: a value is not allowed; names the field.
        """
        return SamplingParams(**{**self.generation_defaults, **fields})


class RenderedChat(NamedTuple):
    """What a chat template makes of a conversation."""

    text: str
    token_ids: Sequence[int]


class Prompts:
    """The tokenizer and the chat template of one model. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._made_helpers: HelperPool | None = None  # for a template that is not known
        self._texts: LongTexts | None = None  # with the first long text

    async def start(self) -> None:
        """Start a helper if the template needs one, so that the first request does not wait for it.

        Raises:
            ModelLoadError: the template does not compile.
        """
        if self.chat_template.is_known:
            return
        greeting = await asyncio.to_thread(self.helpers.greeting)
        if greeting is None:
            raise ModelLoadError("The chat template takes too much time or memory to compile.")
        if "error" in greeting:
            raise ModelLoadError(greeting["error"])

    def close(self) -> None:
        """End the helpers."""
        if self._made_helpers is not None:
            self._made_helpers.close()
        if self._texts is not None:
            self._texts.close()

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> Sequence[int]:
        """Return the ids of ``text``. ``most_tokens``: reject a text that is certain to have more, at once.

        Raises:
            RequestError: the text is too long, or not Unicode.
            CapacityError: too many long texts wait (retryable).
        """
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        least = self.tokenizer.min_tokens(len(text))
        if most_tokens is not None and least > most_tokens:
            raise too_long(f"at least {least}", most_tokens)
        if (least == 0 or most_tokens is None) and len(text) > TEXT_CHARACTERS:
            raise too_many("A text of the prompt", len(text), TEXT_CHARACTERS, "characters", "prompt")
        if self._texts is None:
            self._texts = import_module("quire.engine.large_input").LongTexts(self.tokenizer)
        return await self._texts.encode(text, add_special_tokens=add_special_tokens)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        most_tokens: int | None = None,
        **variables: Any,
    ) -> RenderedChat:
        """Return text and token ids of a conversation. The template writes BOS itself, so tokenizing adds none.

        ``add_generation_prompt`` None: begin an answer, unless the final message is continued. ``variables`` are
        further variables for the template (`enable_thinking` …). ``most_tokens``: as for `tokenize`.

        Raises:
            RequestError: there is no template, or it rejects the messages, fails on them, or takes too much.
            CapacityError: too many conversations wait for a helper process (retryable: 503).
        """
        options: dict[str, Any] = {
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": (
                not continue_final_message if add_generation_prompt is None else add_generation_prompt
            ),
            "continue_final_message": continue_final_message,
            "variables": variables,
        }
        if self.chat_template.is_known:
            text = await off_loop(len(messages), partial(self.chat_template.render, messages, **options))
        else:
            text = await asyncio.wrap_future(self._submit(messages, options))
        ids = await self.tokenize(text, add_special_tokens=add_special_tokens, most_tokens=most_tokens)
        return RenderedChat(text, ids)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """As `ChatTemplate.render`, in a helper if need be; blocks: for a thread other than the event loop's."""
        if self.chat_template.is_known:
            return self.chat_template.render(messages, **options)
        return self._submit(messages, options).result()

    @property
    def helpers(self) -> HelperPool:
        if self._made_helpers is None:
            pools = import_module("quire.engine.helper_pool")
            self._made_helpers = pools.HelperPool("template", self._sources)
        return self._made_helpers

    def _sources(self) -> Head:
        special = self.chat_template.special
        return {
            "templates": self.chat_template.sources,
            "roles": dict(special.roles),
            "additional": list(special.additional),
        }

    def _submit(self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> Future[str]:
        now = self.chat_template.clock().isoformat()
        try:
            return self.helpers.submit({"messages": list(messages), "now": now, **options}, _text_of)
        except RecursionError:
            raise RequestError("messages or tools are nested too deeply.", param="messages") from None


def _text_of(answer: Head | None, late: bool) -> str:
    if answer is None and late:
        limit_s = import_module("quire.engine.helper_pool").TASK_LIMIT_S
        raise over_limit(f"it takes longer than {limit_s:g} s")
    if answer is None:
        raise over_limit("it takes more memory or stack than is allowed")
    if "error" in answer:
        raise RequestError(answer["error"], param=answer["param"], code=answer["code"])
    text: str = answer["text"]
    return text


async def off_loop(size: int, function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``; on a thread if ``size``, the number of elements it walks over, is large."""
    return function(*args) if size <= INLINE_ELEMENTS else await asyncio.to_thread(function, *args)


def prompts_of(model: ModelInfo, tokenizer: Tokenizer, chat_template: ChatTemplate) -> Prompts:
    """Return the `Prompts` of ``model``: those of one that sees take images, and an encoder has no conversations."""
    if model.vision is not None:
        seeing: Prompts = import_module("quire.engine.images").SeeingPrompts(
            tokenizer, chat_template, model.vision
        )
        return seeing
    if not model.writes_text:
        silent: Prompts = import_module(_SENTENCES).SilentPrompts(tokenizer, chat_template, model)
        return silent
    return Prompts(tokenizer, chat_template)
