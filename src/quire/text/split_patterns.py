"""The regular expressions that byte-level vocabularies split text with before merging, by name.

Sources: OpenAI's tiktoken (`tiktoken_ext/openai_public.py`), the tokenizer files of the models, and the names that
llama.cpp writes as `tokenizer.ggml.pre` (`llama-vocab.cpp`). In the syntax of Oniguruma, which `tokenizers` uses.
A vocabulary with several expressions applies them one after the other, each inside the pieces of the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreSequence

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
    """How a byte-level vocabulary prepares text, with the two flags that go with the name in GGUF files."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False  # a piece that is itself a token is taken as it is, without merging
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
