"""Byte-level BPE tokenizers: built from their parts, with the regular expressions that split text before merging.

Sources of the expressions: OpenAI's tiktoken (`tiktoken_ext/openai_public.py`), the tokenizer files of the models, and
the names that llama.cpp writes as `tokenizer.ggml.pre` (`llama-vocab.cpp`). They are in the syntax of Oniguruma, which
`tokenizers` uses. A vocabulary with several expressions applies each inside the pieces of the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = r"[^\r\n\p{L}\p{N}]?"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = rf"{_CONTRACTION}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN2 = rf"{_CONTRACTION}|{_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
O200K = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
TEKKEN = (
    rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DIGIT = r"\p{N}"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"""| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}""",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")
_GGML_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level vocabulary prepares text, with two flags that GGUF files imply by the same name."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False  # a piece that is itself a token is used without merging
    add_bos: bool = False
    nfc: bool = False  # Unicode normalization form C before splitting


_GPT2 = Splitting((GPT2,))
_DIGITS_APART = Splitting((_DIGIT, GPT2))
_CL100K = Splitting((CL100K,))
_LLAMA3 = Splitting((CL100K,), whole_words_first=True, add_bos=True)
_QWEN2 = Splitting((QWEN2,), nfc=True)
_O200K = Splitting((O200K,))

# `tokenizer.ggml.pre`
GGUF_SPLITTINGS: Mapping[str, Splitting] = {
    "default": Splitting(_GGML_DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "roberta-bpe", "gigachat"), _GPT2),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), _QWEN2),
    "stablelm2": Splitting((QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _O200K),
    "tekken": Splitting((TEKKEN,), whole_words_first=True, add_bos=True),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), _DIGITS_APART
    ),
    "deepseek-v3": Splitting(_DEEPSEEK_V3),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "falcon": Splitting(_FALCON),
}


def pre_tokenizer(patterns: tuple[str, ...]) -> PreTokenizer:
    """Return the pre-tokenizer that splits by ``patterns`` and then spells bytes in GPT-2's alphabet."""
    splits = [Split(Regex(pattern), behavior="isolated", invert=False) for pattern in patterns]
    return PreSequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
