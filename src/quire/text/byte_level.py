"""Build byte-level BPE tokenizers from their parts; recover merges where a file has ranks only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from quire.errors import ModelLoadError
from quire.text.split_patterns import Splitting, pre_tokenizer


def byte_level_backend(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    splitting: Splitting,
    added: Mapping[int, AddedToken],
    source: str,
) -> Backend:
    """Return a byte-level BPE tokenizer. Raises `ModelLoadError`, naming ``source``, for merges of unknown tokens.

    ``vocab``: tokens in GPT-2's alphabet -> ids. ``added``: tokens outside of the merges at their ids, which may leave
    gaps: they are entered into the vocabulary itself, where ids are free.
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
    """Register tokens that are matched before splitting, and check that each has the id its file gives it."""
    for token_id, token in sorted(added.items()):
        backend.add_tokens([token])
        found = backend.token_to_id(token.content)
        if found != token_id:
            raise ModelLoadError(
                f"The added token {token.content!r} should have id {token_id} but the vocabulary gives it {found}: "
                "the tokenizer files do not belong together. Use all of them from one repository."
            )


def add_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Let ``backend`` put ``bos`` before and ``eos`` after a text; None for none of it."""
    names = [name for name in (bos, eos) if name is not None]
    backend.post_processor = TemplateProcessing(
        single=[*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])],
        special_tokens=[(name, backend.token_to_id(name)) for name in dict.fromkeys(names)],
    )


def merges_by_rank(ranks: Mapping[str, int], whole: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token, in the order in which BPE applies them.

    ``whole``: tokens that may be the result of a merge, with a key (smallest first). A token that can be made of
    several pairs gets all of them: sentencepiece and tiktoken join any two neighbours whose join is a token.
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
