"""Text in and out: tokenizers from every common file form, chat templates, detokenization, stop strings.

Torch-free, and free of the clock: `strftime_now` of a template gets its clock injected.
"""

from quire.text.chat_template import ChatTemplate
from quire.text.gguf_vocab import tokenizer_from_gguf_metadata
from quire.text.load import load_tokenizer
from quire.text.stop import StopMatcher
from quire.text.tokenizer import IncrementalDetokenizer, SpecialTokens, Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "SpecialTokens",
    "StopMatcher",
    "Tokenizer",
    "load_tokenizer",
    "tokenizer_from_gguf_metadata",
]
