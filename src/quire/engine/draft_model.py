"""`find_draft`: the draft model that the settings ask for, checked against the model. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.args import EngineArgs
from quire.errors import ConfigError
from quire.models.checkpoint import Checkpoint, describe, read_tokenizer
from quire.models.hub import locate
from quire.plan.speculation import DraftCheckpoint
from quire.text.tokenizer import Tokenizer

SELF = "self:"  # the model's own weights in another format


def find_draft(args: EngineArgs, checkpoint: Checkpoint) -> DraftCheckpoint | None:
    """Return the draft model of ``args`` for the model in ``checkpoint``; None: there is none.

    Raises:
        ConfigError: its vocabulary differs, or the settings contradict each other.
        ModelLoadError, UnsupportedModelError: it cannot be found, read or run.
    """
    if args.speculate == "ngram" and args.draft_model is not None:
        raise ConfigError(
            f"draft_model = {args.draft_model!r} has no use with speculate = 'ngram': leave one of them out"
        )
    if args.speculate != "draft" and args.draft_model is None:
        return None
    name = args.draft_model or ("quill-draft" if args.model == "quill" else "self:int4")
    if name.startswith(SELF):
        return DraftCheckpoint(
            name,
            str(checkpoint.path),
            checkpoint.spec,
            checkpoint.formats,
            args.load_format,
            quantize=name.removeprefix(SELF),
        )
    found = describe(locate(name), args.load_format)
    if found.kind != "random":
        check_vocabulary(name, read_tokenizer(found.tokenizer), read_tokenizer(checkpoint.tokenizer))
    return DraftCheckpoint(name, str(found.path), found.spec, found.formats, args.load_format)


def check_vocabulary(name: str, draft: Tokenizer, target: Tokenizer) -> None:
    """Raise `ConfigError` with the first id that stands for another token in the draft model."""
    for token_id in range(max(draft.vocab_size, target.vocab_size)):
        theirs, ours = draft.id_to_token(token_id), target.id_to_token(token_id)
        if theirs != ours:
            raise ConfigError(
                f"draft_model = {name!r} has another vocabulary: id {token_id} is {_said(theirs)} there and "
                f"{_said(ours)} in the model. Take a draft model of the same family, or self:int4"
            )


def _said(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def speculation_of(config: Any) -> dict[str, Any]:
    """Return our keywords for vLLM's ``speculative_config``.

    Its ``prompt_lookup_min`` and ``prompt_lookup_max`` have no effect: a suffix of any length is found.

    Raises:
        ConfigError: a field is unknown, or the method is not one that is here.
    """
    known = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
    if not isinstance(config, Mapping) or not set(config) <= set(known):
        raise ConfigError(f"LLM: speculative_config = {config!r} must be a dict with {', '.join(known)}")
    method = config.get("method") or ("draft_model" if "model" in config else None)
    if method not in ("ngram", "draft_model"):
        raise ConfigError(f"LLM: speculative_config: method = {method!r} must be 'ngram' or 'draft_model'")
    found: dict[str, Any] = {"speculate": "ngram" if method == "ngram" else "draft"}
    if method == "draft_model" and "model" in config:
        found["draft_model"] = config["model"]
    if "num_speculative_tokens" in config:
        found["spec_tokens"] = config["num_speculative_tokens"]
    return found
