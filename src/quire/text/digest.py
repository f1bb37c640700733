"""Digests of a request's text: the chain that prefix-aware routing compares. The gateway has no tokenizer.

The conversation is laid out as a chat template does it (system, tools, messages) and cut in pieces of equal bytes:

    root     = H(model, cache salt)
    piece i  = H(digest of piece i − 1 (or root), the bytes of piece i)

Two requests share a chain as far as their texts agree in whole pieces. Adapters are models by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

_DIGEST_BYTES = 16
ROLE_END = b"\1"  # between a message's role and its text
# Long lists of token ids in a large body are arrays.
_encode = msgspec.json.Encoder(enc_hook=lambda ids: ids.tolist()).encode


def root_of(model: str, salt: str) -> bytes:
    """Return the digest that the chains of one model and salt begin with."""
    name = model.encode()
    text = len(name).to_bytes(8, "big") + name + salt.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=_DIGEST_BYTES, person=b"quire.text.v1").digest()


def digests(root: bytes, text: bytes, piece_bytes: int) -> list[bytes]:
    """Return the chain over the whole pieces of ``text``."""
    chain, parent = [], root
    for start in range(0, len(text) - piece_bytes + 1, piece_bytes):
        parent = blake2b(parent + text[start : start + piece_bytes], digest_size=_DIGEST_BYTES).digest()
        chain.append(parent)
    return chain


def digested_text(body: Mapping[str, Any]) -> bytes:
    """Return the text of a request in any of the dialects, in the order in which a model reads it."""
    return b"\0".join(digested_parts(body))


def digested_parts(body: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the parts of `digested_text`, in order."""
    for key in ("system", "instructions"):  # Anthropic, Responses
        if body.get(key):
            yield _text(body[key])
    messages = body.get("messages", body.get("input"))
    rest = messages if isinstance(messages, list) else []
    num_system = 0
    for message in rest:
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            break
        num_system += 1
        yield _message(message)
    if body.get("tools"):
        yield _encode(body["tools"])
    for message in rest[num_system:]:
        yield _message(message)
    if isinstance(messages, str):
        yield _text(messages)
    # llama.cpp's /infill has what stands around the cursor, TGI ``inputs``.
    for key in ("input_extra", "input_prefix", "prompt", "inputs", "input_suffix", "suffix"):
        if key in body and (key == "prompt" or body[key]):
            yield _text(body[key])


def _message(message: Any) -> bytes:
    """Return one message: role and text, or all of its JSON where there is more than that."""
    if isinstance(message, dict) and len(message) == 2 and isinstance(message.get("content"), str):
        return _text(message.get("role")) + ROLE_END + _text(message["content"])
    return _encode(message)


def _text(value: Any) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else _encode(value)
