"""Texts of an encoder: what a request may ask of it, the prompts of its files, and texts that are cut to its length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from quire.engine.pooling import NOTHING_SAMPLED, Scoring, ScoringPrompt, scoring_prompts
from quire.engine.prompts import ModelInfo, Prompts, RenderedChat
from quire.errors import RequestError
from quire.request import Pooling
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

# ``input_type`` of a request → names of prompts that mean it, the best one first.
PROMPTS_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("query", "search_query"), ("query", "search_query")),
    **dict.fromkeys(("document", "passage", "search_document"), ("document", "passage", "search_document")),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


class SilentPrompts(Prompts):
    """The prompts of an encoder, which answers no conversation."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate, model: ModelInfo) -> None:
        super().__init__(tokenizer, chat_template)
        self._model = model

    async def chat(self, messages: Sequence[Mapping[str, Any]], *args: Any, **options: Any) -> RenderedChat:
        """Raise `RequestError`: there is no text to answer with."""
        raise writes_no_text(self._model)


def writes_no_text(model: ModelInfo) -> RequestError:
    """Return the error of a request that wants text of an encoder."""
    what, instead = "an encoder", "vectors (/v1/embeddings)"
    if model.sentence is not None and model.sentence.labels:
        what, instead = "a classifier", _scores_of(model.sentence.labels)
    elif model.sentence is not None and model.sentence.sparse:
        instead = "sparse vectors (/embed_sparse)"
    return RequestError(
        f"model {model.names[0]!r} is {what}, which writes no text: ask it for {instead}.",
        param="model",
        code="unsupported_model",
    )


def _scores_of(labels: Sequence[str]) -> str:
    """Return what to ask of a classifier: a rerank needs the score of one label."""
    return "scores (/v1/rerank)" if len(labels) == 1 else "labels (/classify)"


def pooling_of(model: ModelInfo, wanted: str | None) -> Pooling:
    """Return how the rows of a text become its vector: as ``wanted``, else as the model's files say.

    Raises:
        RequestError: an encoder was not trained for what is ``wanted``, or a model gives no vectors.
    """
    if model.writes_text:
        if wanted not in (None, "last", "mean"):
            raise RequestError(
                f"pooling = {wanted!r} is not allowed: it must be 'last' or 'mean'.", param="pooling"
            )
        own = "last" if model.sentence is None else model.sentence.pooling
        return Pooling("mean" if (wanted or own) == "mean" else "last")
    assert model.sentence is not None
    if model.sentence.sparse:
        raise RequestError(
            f"model {model.names[0]!r} gives sparse vectors, a weight per token: ask it for those (/embed_sparse).",
            param="model",
            code="unsupported_model",
        )
    if model.sentence.labels:
        raise RequestError(
            f"model {model.names[0]!r} is a classifier, which gives no vectors: ask it for "
            f"{_scores_of(model.sentence.labels)}.",
            param="model",
            code="unsupported_model",
        )
    own = model.sentence.pooling
    if wanted is not None and wanted != own:
        raise RequestError(
            f"pooling = {wanted!r} is not allowed: this model was trained with {own!r}; leave pooling out.",
            param="pooling",
        )
    return Pooling(own)


def vectors_of(model: ModelInfo, wanted: str | None) -> tuple[Pooling, str, bool]:
    """Return how texts are pooled, what is put before each, and whether their vectors are scaled to length one."""
    scales = model.sentence is None or model.sentence.normalize
    return pooling_of(model, wanted), prompt_before(model, None), scales


def prompt_of_type(model: ModelInfo, input_type: str | None) -> str | None:
    """Return the model's prompt for an ``input_type`` of Cohere's, Voyage's or NVIDIA's clients; None: it has none."""
    if input_type is None or model.sentence is None:
        return None
    known = {name.lower(): name for name, _ in model.sentence.prompts}
    return next((known[name] for name in PROMPTS_OF_TYPE[input_type] if name in known), None)


def rows_of(model: ModelInfo, kind: Literal["tokens", "sparse"]) -> Pooling:
    """Return how an encoder gives its rows, or of a model with a head of masked tokens its weights.

    Raises:
        RequestError: the model has none.
    """
    sentence = model.sentence
    sparse = sentence is not None and sentence.sparse
    if model.writes_text or sentence is None or sentence.labels or (kind == "sparse" and not sparse):
        lacks = (
            "sparse vectors: load one of SPLADE"
            if kind == "sparse"
            else "rows of tokens: load an encoder of vectors"
        )
        raise RequestError(
            f"model {model.names[0]!r} gives no {lacks}.", param="model", code="unsupported_model"
        )
    return Pooling(kind)


def sparse_weights(pooled: Sequence[float]) -> list[tuple[int, float]]:
    """Return the tokens of a "sparse" `Pooling` and their weights, in the order of their ids."""
    half = len(pooled) // 2
    return [(int(token_id), weight) for token_id, weight in zip(pooled[:half], pooled[half:], strict=True)]


def prompt_before(model: ModelInfo, name: str | None) -> str:
    """Return what is put before a text: the prompt ``name`` of the model, None: its default one.

    Raises:
        RequestError: the model has no such prompt.
    """
    sentence = model.sentence
    prompts = {} if sentence is None else dict(sentence.prompts)
    name = name or (None if sentence is None else sentence.default_prompt)
    if name is None:
        return ""
    if name not in prompts:
        known = f"it has {', '.join(map(repr, prompts))}" if prompts else "it has none"
        raise RequestError(
            f"prompt_name = {name!r} is not a prompt of this model: {known}.", param="prompt_name"
        )
    return prompts[name]


def pair_prompts(
    model: ModelInfo,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    scoring: Scoring | None,
    instruction: str | None,
    render: Callable[..., str] | None,
    *,
    truncate: bool = False,
    raw: bool = False,
) -> list[ScoringPrompt]:
    """Return the prompts by which pairs are scored: as a cross-encoder does it, or a decoder (`scoring_prompts`).

    ``truncate``: cut pairs that the model cannot hold. ``raw``: logits in place of scores. Both are for cross-encoders.

    Raises:
        RequestError: the model gives vectors, or more than one score, or there is another way of scoring.
    """
    sentence = model.sentence
    for name, wanted in (("truncate", truncate), ("raw_scores", raw)):
        if wanted and model.writes_text:
            raise RequestError(f"{name} = true is for cross-encoders, and this model is none.", param=name)
    if model.writes_text:
        ranks = sentence is not None and sentence.yes_no is not None
        scoring = scoring or ("yes_no" if ranks else "likelihood")
        if scoring == "yes_no" and sentence is not None and sentence.yes_no is not None:
            own = prompt_before(model, None) or None
            prompts = scoring_prompts(pairs, scoring, instruction or own, tokenizer, render)
            return [prompt._replace(pooling=Pooling("logprobs", sentence.yes_no)) for prompt in prompts]
        return scoring_prompts(pairs, scoring, instruction, tokenizer, render)
    assert sentence is not None
    count = len(sentence.labels)
    if count != 1:
        what = f"has {count} labels (/classify)" if count else "gives vectors (/v1/embeddings)"
        raise RequestError(
            f"model {model.names[0]!r} {what}, and a score needs a cross-encoder.", param="model"
        )
    for name, value in (("scoring", scoring), ("instruction", instruction)):
        if value is not None:
            raise RequestError(
                f"{name} is not for a cross-encoder, which has one way: leave it out.", param=name
            )
    return label_prompts(model, tokenizer, pairs, truncate=truncate, raw=raw)


def label_prompts(
    model: ModelInfo,
    tokenizer: Tokenizer,
    inputs: Sequence[tuple[str, ...]],
    *,
    truncate: bool,
    raw: bool = False,
) -> list[ScoringPrompt]:
    """Return the prompts that a classifier gives a score per label; an input is a text or a pair.

    Raises:
        RequestError: the model is no classifier.
    """
    if model.sentence is None or not model.sentence.labels:
        raise RequestError(
            f"model {model.names[0]!r} is no classifier, and has no labels.",
            param="model",
            code="unsupported_model",
        )
    limit, prompts = model.max_model_len if truncate else None, []
    for texts in inputs:
        if len(texts) == 1:
            ids, second_from = tokenizer.encode(texts[0]), 0
            ids = ids if limit is None else cut(ids, limit, tokenizer)
        else:
            keep = None if limit is None else partial(kept_of_pair, limit=limit)
            ids, second_from = tokenizer.encode_pair(texts[0], texts[1], keep)
        pooling = Pooling("logits" if raw else "classify", second_from=second_from)
        prompts.append(ScoringPrompt(ids, NOTHING_SAMPLED, pooling, 0))
    return prompts


def kept_of_pair(texts: Sequence[int | None], limit: int) -> list[int]:
    """Return the places that are kept of a pair: all marks, and of each text its beginning, the longer one cut first.

    ``texts``: the text of each place, 0 or 1, or None for a mark. As tokenizers' "longest_first".
    """
    first, second = texts.count(0), texts.count(1)
    room = max(0, limit - (len(texts) - first - second))
    shorter = min(first, second)
    if 2 * shorter >= room:
        # The longer text has the odd one.
        less = room // 2
        most = (less, room - less) if first <= second else (room - less, less)
    else:
        most = (first, room - first) if first <= second else (room - second, second)
    places, seen = [], [0, 0]
    for place, text in enumerate(texts):
        if text is not None:
            seen[text] += 1
        if text is None or seen[text] <= most[text]:
            places.append(place)
    return places


def cut(ids: Sequence[int], limit: int, tokenizer: Tokenizer) -> list[int]:
    """Return the first ``limit`` of ``ids``, whose last ones are those that end every text ([SEP])."""
    if len(ids) <= limit:
        return list(ids)
    ends = endings(tokenizer)
    ends = ends if tuple(ids[len(ids) - len(ends) :]) == ends else ()
    return [*ids[: max(0, limit - len(ends))], *ends][:limit]


def endings(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids that are put behind every text."""
    around, with_text = tokenizer.encode(""), tokenizer.encode("a")
    num_same = 0
    while num_same < len(around) and around[-1 - num_same] == with_text[-1 - num_same]:
        num_same += 1
    first = 0
    while first < len(around) and around[first] == with_text[first]:
        first += 1
    return tuple(around[max(len(around) - num_same, first) :])
