"""The waist between API and core: `Request` down, `TokenEvent` up. Frozen: they cross a process boundary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.errors import RequestError, clip
from quire.pooling import Pooling as Pooling
from quire.spans import Span
from quire.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_N = 128
SEED_MAX = 2**63 - 1
TOKEN_ID_MAX = 2**31 - 1  # ids are int32 in the engine
# A seed of 53 bits in JSON survives clients that read numbers as doubles.
SEED_BITS = 53

if TYPE_CHECKING:  # users may give lists, of which `SamplingParams` makes tuples
    Strings = Sequence[str]
    TokenIds = Sequence[int]
    TokenSequences = Sequence[Sequence[int]]
else:  # decoded from the wire
    Strings = tuple[str, ...]
    TokenIds = tuple[int, ...]
    TokenSequences = tuple[tuple[int, ...], ...]


class FinishReason(StrEnum):
    """Why a sequence ended. Exactly one terminal event carries one of these."""

    STOP = "stop"  # an EOS or stop id (core), or a stop string (frontend)
    LENGTH = "length"  # max_tokens or the end of the context
    ABORT = "abort"  # the client went away or asked for it; shutdown
    DEADLINE = "deadline"  # Terms.deadline passed; earlier tokens were delivered
    ERROR = "error"  # failed, with a text in TokenEvent.error


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one sampled token, of the raw logits (before penalties and temperature)."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most ``num_tokens`` tokens of reasoning, over all its sections; then its end is forced.

    ``begin_id`` and ``end_id`` are the tokens around reasoning; ``is_open``: the prompt ends inside of it.
    """

    num_tokens: int
    begin_id: int
    end_id: int
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request is sampled, in vLLM's names: what the core and the worker read.

    `SamplingParams` checks the values at the edge, once, and `SamplingParams.resolve` adds what the model decides.
    """

    n: int = 1
    # How many to sample; the n with the largest mean log-probability are returned. With beam search: the width.
    best_of: int | None = None
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # [0, 1]
    typical_p: float = 1.0  # (0, 1]; 1: off
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # [1e-6, 1e6]
    repeat_last_n: int | None = None  # tokens that penalties read; None: all of the context
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> [-100, 100]
    seed: int | None = None
    max_tokens: int | None = 16  # None: to the end of the context; 0: only prompt_logprobs
    min_tokens: int = 0
    stop: Strings = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: bool = False
    allowed_token_ids: TokenIds | None = None
    thinking_budget: ThinkingBudget | None = None
    logprobs: int | None = None  # how many alternatives beside the sampled token, 0…20
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    skip_special_tokens: bool = True
    use_beam_search: bool = False  # width: best_of, or n
    length_penalty: float = 1.0  # beams: scores are divided by length ** length_penalty
    early_stopping: bool | str = False  # beams: true, false or "never"
    eos_token_ids: TokenIds = ()  # the model's; empty with ignore_eos
    bad_words_token_ids: TokenSequences = ()  # every spelling of `SamplingParams.bad_words`

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.use_beam_search

    @property
    def num_samples(self) -> int:
        """How many sequences of the request end with a terminal event of their own."""
        return self.n if self.use_beam_search or self.best_of is None else self.best_of

    @property
    def beam_width(self) -> int:
        return self.best_of or self.n

    @property
    def num_top_logprobs(self) -> int | None:
        """How many of the most likely tokens the sampler names with each token; None: not even the token's own.

        For beams as many as always leave ``beam_width`` that do not end, however many ends there are.
        """
        if self.use_beam_search:
            num_ends = len({*self.eos_token_ids, *self.stop_token_ids})
            return max(2, 1 + num_ends) * self.beam_width
        return 0 if self.logprobs is None and self.best_of is not None else self.logprobs


@dataclass(frozen=True, slots=True)
class SamplingParams(Sampling):
    """What a user asks for. Wrong values raise `RequestError` that names the field."""

    bad_words: Strings = ()
    ignore_eos: bool = False
    structured_outputs: StructuredOutputsParams | None = None  # compiled by the frontend: `Request.grammar`

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "eos_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.top_p == 0 and not self.use_beam_search:  # the smallest nucleus: the most likely token
            object.__setattr__(self, "top_k", 1)
            object.__setattr__(self, "top_p", 1.0)
        for name, off in (("top_k", 0), ("repeat_last_n", None)):
            if getattr(self, name) == -1:
                object.__setattr__(self, name, off)
        object.__setattr__(self, "bad_words_token_ids", tuple(tuple(ids) for ids in self.bad_words_token_ids))
        _check(self)
        if self.best_of == self.n:  # nothing to choose
            object.__setattr__(self, "best_of", None)

    def resolve(
        self, *, seed: int, max_tokens: int, eos_token_ids: TokenIds, bad_words_token_ids: TokenSequences
    ) -> Sampling:
        """Return the sampling of a request, with what only the model, the tokenizer and the prompt can tell."""
        values = {field.name: getattr(self, field.name) for field in fields(Sampling)}
        values |= {"seed": seed, "max_tokens": max_tokens, "bad_words_token_ids": bad_words_token_ids}
        return Sampling(**{**values, "eos_token_ids": () if self.ignore_eos else eos_token_ids})


# What each number may be; None is allowed where the field's type says so.
RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, MAX_N, f"an integer in 1…{MAX_N}"),
    "temperature": (0.0, 100.0, "a number in 0…100 (0 is greedy)"),
    "top_p": (math.ulp(0.0), 1.0, "a number in 0…1 (0 is the most likely token)"),
    "top_k": (0, 2**31, "a positive integer, or 0 or -1 to turn it off"),
    "min_p": (0.0, 1.0, "a number in 0…1"),
    "typical_p": (math.ulp(0.0), 1.0, "a number in (0, 1]"),
    "length_penalty": (-100.0, 100.0, "a number in -100…100"),
    "presence_penalty": (-2.0, 2.0, "a number in -2…2"),
    "frequency_penalty": (-2.0, 2.0, "a number in -2…2"),
    "repetition_penalty": (1e-6, 1e6, "a number in 0.000001…1000000"),  # smaller ones overflow a logit
    "repeat_last_n": (0, 2**31, "an integer ≥ 0, or null or -1 for the whole context"),
    "min_tokens": (0, 2**31, "an integer ≥ 0"),
    "max_tokens": (1, 2**31, f"an integer in 1…{2**31}, or null"),
    "seed": (-(2**63), SEED_MAX, f"an integer in {-(2**63)}…{SEED_MAX}, or null"),
    "logprobs": (0, MAX_LOGPROBS, f"an integer in 0…{MAX_LOGPROBS}, or null"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"an integer in 0…{MAX_LOGPROBS}, or null"),
}
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "repeat_last_n"}
_INTEGERS = {"n", "top_k", "min_tokens", *_OPTIONAL}


def wrong(param: str, value: Any, allowed: str) -> RequestError:
    return RequestError(f"{param} = {clip(value)} is not allowed: it must be {allowed}.", param=param)


def clip_ids(ids: Sequence[int]) -> Sequence[int | str]:
    return [*ids[:8], "…"] if len(ids) > 8 else list(ids)


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check(params: SamplingParams) -> None:
    for name, (low, high, allowed) in RANGES.items():
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            continue
        if name == "max_tokens" and params.prompt_logprobs is not None:
            low, allowed = 0, allowed.replace("1", "0", 1)
        number = is_int(value) if name in _INTEGERS else (is_int(value) or isinstance(value, float))
        if not number or not low <= value <= high:
            raise wrong(name, value, allowed)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise wrong("min_tokens", params.min_tokens, f"at most max_tokens = {params.max_tokens}")
    for token_id, bias in params.logit_bias.items():
        if not is_int(token_id) or token_id < 0 or not -100.0 <= bias <= 100.0:
            raise wrong("logit_bias", {token_id: bias}, "a map of token ids to numbers in -100…100")
    for name, text in [("stop", t) for t in params.stop] + [("bad_words", t) for t in params.bad_words]:
        if not isinstance(text, str) or not text:
            raise wrong(name, text, "non-empty strings")
    for name in ("stop_token_ids", "allowed_token_ids"):
        for token_id in getattr(params, name) or ():
            if not is_int(token_id) or token_id < 0:
                raise wrong(name, token_id, "token ids (integers ≥ 0)")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise wrong("allowed_token_ids", [], "a list of at least one token id, or null")
    if params.thinking_budget is not None:
        _check_budget(params.thinking_budget, params.allowed_token_ids)
    if any(getattr(params, name) != DEFAULTS[name] for name in _CHOICE):
        import_module("quire.beam_fields").check_choice(params)
    form = params.structured_outputs
    if form is not None and not isinstance(form, StructuredOutputsParams):
        raise wrong("structured_outputs", form, "a StructuredOutputsParams, or None")
    if form is not None and params.ignore_eos:
        raise wrong("ignore_eos", True, f"false with {form.param}: a complete answer ends with an EOS token")


def _check_budget(budget: ThinkingBudget, allowed_token_ids: TokenIds | None) -> None:
    for name in ("num_tokens", "begin_id", "end_id"):
        value = getattr(budget, name)
        if not is_int(value) or not 0 <= value <= SEED_MAX:
            raise wrong(f"thinking_budget.{name}", value, f"an integer ≥ 0, at most {SEED_MAX}")
    if allowed_token_ids and budget.end_id not in allowed_token_ids:
        allowed = f"a list with the end of reasoning, {budget.end_id}"
        raise wrong("allowed_token_ids", clip_ids(allowed_token_ids), allowed)


_CHOICE = ("best_of", "use_beam_search", "early_stopping", "length_penalty")
DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}


class Adapter(NamedTuple):
    """A LoRA adapter that a request runs with. The core and the cache tell adapters apart by ``key`` alone."""

    name: str  # name in requests
    path: str  # folder, on the machine of the workers
    key: str  # digest of its content
    rank: int  # the largest of its modules
    saved: tuple[str, ...] = ()  # replaced matrices: "embed_tokens", "lm_head"


@dataclass(frozen=True, slots=True)
class Deadline:
    """Limits of a request, in seconds from its arrival; None: no limit."""

    first_token_s: float | None = None
    total_s: float | None = None

    def missed(self, name: str, num_output_tokens: int) -> str:
        """Return the error of a sequence that missed the limit ``name``: "first_token" or "total"."""
        is_first = name == "first_token"
        limit_s = (self.first_token_s if is_first else self.total_s) or 0.0
        when = "before the first token" if is_first else f"after {num_output_tokens} output tokens"
        return f"deadline_ms.{name} = {limit_s * 1e3:g} has passed {when}."


class Tenant(NamedTuple):
    """For whom a request runs."""

    name: str = ""
    weight: float = 1.0  # share of the engine under the order "fair"; above 0


NO_TENANT = Tenant()


class KvTerms(NamedTuple):
    """What a request says of KV blocks that peers compute."""

    gives: bool = False  # its prompt is computed for a peer, and nothing is sampled
    engine_id: str = ""  # the peer that computes it
    num_tokens: int = 0  # computed there, from the first on
    max_load_tokens: int | None = None  # None: as many as pay


@dataclass(frozen=True, slots=True)
class Terms:
    """For whom a request runs and how soon: what the edge knows of its call, and what its body adds."""

    tenant: Tenant = NO_TENANT
    priority: int = 0  # smaller runs first, as in vLLM
    cache_salt: str = ""  # requests share cached blocks only within one salt
    deadline: Deadline | None = None
    kv: KvTerms | None = None


NO_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the core sees it: ids only, every default resolved, valid by construction.

    ``sampling`` has its seed, ``max_tokens`` and ids by now. Times are seconds of the core's clock.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    arrival_s: float
    terms: Terms = NO_TERMS
    adapter: Adapter | None = None  # None: the base model
    grammar: str | None = None  # in the form that `quire.text.grammar_matcher` compiles
    # After a restart of the engine: what each of the n sequences had already produced.
    output_token_ids: tuple[tuple[int, ...], ...] = ()
    # After a restart: samples whose terminal event was already delivered; they are not computed again.
    finished_samples: tuple[int, ...] = ()
    pooling: Pooling | None = None
    spans: tuple[Span, ...] = ()  # in ascending order

    @property
    def prompt_only(self) -> bool:
        """Whether it ends with its prompt computed, and samples no token."""
        return self.pooling is not None or self.sampling.max_tokens == 0


class SampleTiming(NamedTuple):
    """How a sequence came to its tokens. Seconds; 0 for what has not happened yet."""

    num_cached_tokens: int = 0  # prompt tokens from the prefix cache, first admission
    num_preemptions: int = 0
    queued_s: float = 0.0  # arrival to first admission
    ttft_s: float = 0.0  # arrival to first token
    num_steps: int = 0  # steps that gave the sequence something
    num_chunks: int = 0  # steps with tokens known before
    cache_miss: str = ""  # why prompt tokens missed the cache; empty: none did
    engine_s: float = 0.0  # its share of the time of each step, by scheduled tokens
    kv_block_s: float = 0.0  # blocks × seconds; shared blocks count per sequence
    num_loaded_tokens: int = 0  # cached ones that were loaded for it


class TokenEvent(NamedTuple):
    """Progress of one sequence of a request. The last one of each sequence carries ``finish_reason``.

    A named tuple, as in `quire.step`: one is made per sequence and step, a frozen dataclass takes six times as long.
    """

    request_id: str
    sample_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # EOS or stop id that ended it, also last in token_ids
    error: str | None = None  # with FinishReason.ERROR (also if refused) and DEADLINE
    # "capacity", "hopeless" (both retryable), "never_fits", "step", "internal", "deadline".
    error_kind: str | None = None
    # With the first token after an admission and at the end; with every token where a stop string may end the sequence.
    timing: SampleTiming | None = None
    # Of the prompt's tokens prompt_start, prompt_start + 1 …; after a preemption or a restart they may come again.
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_start: int = 0
    pooled: tuple[float, ...] | None = None  # with the terminal event of a `Pooling`
    retry_after_s: float = 0.0  # with error_kind "hopeless"
