"""Byte-level BPE tokenizers: built from their parts, with the expressions that split text (``splittings.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from tokenizers import AddedToken, Regex, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreSequence
from tokenizers.processors import TemplateProcessing

from quire.errors import ModelLoadError


def byte_level_backend(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    splitting: Splitting,
    added: Mapping[int, AddedToken],
    source: str,
) -> Backend:
    """Return a byte-level BPE tokenizer. Raises `ModelLoadError`, naming ``source``, for merges of unknown tokens.

    ``vocab``: tokens in GPT-2's alphabet -> ids. ``added``: tokens by id that no merge produces. Their ids may have
    gaps, so they are entered into the vocabulary itself, where ids are free.
    """
    everything = {**vocab, **{token.content: token_id for token_id, token in added.items()}}
    try:
        model = BPE(vocab=everything, merges=list(merges), ignore_merges=splitting.whole_words_first)
    except Exception as error:  # the Rust side raises plain `Exception`
        raise ModelLoadError(
            f"{source}: the merges do not fit the vocabulary ({error}). The files are damaged, or they do not "
            "belong together: download them again from one repository."
        ) from error
    backend = Backend(model)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(splitting.patterns)
    backend.decoder = decoders.ByteLevel()
    add_tokens(backend, added)
    return backend


def add_tokens(backend: Backend, added: Mapping[int, AddedToken]) -> None:
    """Register tokens that are matched before splitting, and check that each gets the id of its file."""
    for token_id, token in sorted(added.items()):
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != token_id:
            raise ModelLoadError(
                f"The added token {token.content!r} should have id {token_id} but the vocabulary gives it {found}: "
                "the tokenizer files do not belong together. Use all of them from one repository."
            )


def add_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make ``backend`` put ``bos`` before and ``eos`` after a text; None: nothing."""
    names = [name for name in (bos, eos) if name is not None]
    backend.post_processor = TemplateProcessing(
        single=[*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])],
        special_tokens=[(name, backend.token_to_id(name)) for name in dict.fromkeys(names)],
    )


def merges_by_rank(ranks: Mapping[str, int], whole: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token, in the order in which BPE applies them.

    ``whole``: tokens that may result from a merge, each with a sort key (smallest first). A token that several pairs
    can make gets all of them: sentencepiece and tiktoken join any two neighbours whose join is a token.
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for token, key in whole:
        for cut in range(1, len(token)):
            left = ranks.get(token[:cut])
            if left is not None:
                right = ranks.get(token[cut:])
                if right is not None:
                    merges.append((key, left, right, token[:cut], token[cut:]))
    merges.sort()
    return [(left, right) for _, _, _, left, right in merges]


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level vocabulary prepares text: an entry of ``splittings.toml``."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False  # a piece that is itself a token is used without merging
    add_bos: bool = False
    nfc: bool = False  # Unicode normalization form C before splitting


_TABLE = tomllib.loads((files("quire.text") / "splittings.toml").read_text(encoding="utf-8"))
SPLITTINGS: Mapping[str, Splitting] = {
    name: Splitting(
        tuple(entry["patterns"]), **{k: v for k, v in entry.items() if k not in ("patterns", "gguf")}
    )
    for name, entry in _TABLE.items()
}
# By `tokenizer.ggml.pre`.
GGUF_SPLITTINGS: Mapping[str, Splitting] = {
    pre: SPLITTINGS[name] for name, entry in _TABLE.items() for pre in entry["gguf"]
}


def pre_tokenizer(patterns: tuple[str, ...]) -> PreTokenizer:
    """Return the pre-tokenizer that splits by ``patterns`` and then spells bytes in GPT-2's alphabet."""
    splits = [Split(Regex(pattern), behavior="isolated", invert=False) for pattern in patterns]
    return PreSequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
