"""Where the pieces of a request's text end among the blocks of its prompt, for a gateway that routes by cached blocks.

A gateway does not tokenize. It cuts the text of a request into pieces (`quire.text.digest`) and learns here, from
the answer, the hash of the last whole block inside each piece:

    gateway's text   system ⸱ tools ⸱ role ⸱ content ⸱ …   cut every ``piece_bytes``
    rendered prompt  <|system|>content<|user|>content …    the same contents at other places
    tokens           each with its bytes                   cut every ``block_size`` tokens

A place inside a content is found by the content's place in the rendered prompt. A place in what the template writes in
another form (tools) counts as the end of the content before it: a block too early, never one too late.
"""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from starlette.types import Message, Scope, Send

from quire.api.generation import PromptStreams
from quire.api.job import Job
from quire.api.state import ApiState
from quire.cache.events import SHORT_HASH_BYTES
from quire.cache.prefix_cache import extend_chain, root_hash
from quire.config import CacheConfig
from quire.http.account import has_gateway_key
from quire.http.body import header
from quire.http.cache_messages import BLOCKS_HEADER, PIECES_HEADER
from quire.text.digest import ROLE_END, digested_parts
from quire.text.tokenizer import Tokenizer

# Beyond them a prompt's pieces are not told, so that the header stays below 11 KiB.
MAX_PIECES = 512


def telling_blocks(
    send: Send, scope: Scope, state: ApiState, body: Any, job: Job, streams: PromptStreams
) -> Send:
    """Return a `send` that adds `BLOCKS_HEADER` to the answer if a gateway has asked for it; else ``send`` itself."""
    num_pieces, cache = header(scope, PIECES_HEADER.encode()), state.settings.cache
    if num_pieces is None or cache is None or not has_gateway_key(scope, state.settings.gateway_key):
        return send
    if not num_pieces.isdigit() or not isinstance(body, dict) or len(job.prompts) != 1:
        return send
    prompt = job.prompts[0]
    if getattr(prompt, "spans", ()):
        # The hashes of its blocks name images, which the gateway's text does not hold.
        return send
    rendered = job.prompt_text if job.prompt_text is not None else prompt if isinstance(prompt, str) else None

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            adapter = state.adapter_of(job.answer.head.model)
            value = piece_blocks(
                body, int(num_pieces), rendered, streams.token_ids()[0], state.frontend.tokenizer, cache,
                adapter=adapter.key if adapter is not None else "", cache_salt=job.terms.cache_salt,
            )  # fmt: skip
            message["headers"] = [*message["headers"], (BLOCKS_HEADER.encode(), value)]
        await send(message)

    return telling


def piece_blocks(
    body: Mapping[str, Any],
    piece_bytes: int,
    rendered: str | None,
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
    cache: CacheConfig,
    *,
    adapter: str,
    cache_salt: str,
) -> bytes:
    """Return the value of `BLOCKS_HEADER`. ``rendered``: the prompt's text, None where it was given as token ids."""
    if rendered is None or piece_bytes < 1:
        return b""
    ends = piece_ends(body, piece_bytes, rendered.encode("utf-8", "surrogatepass"))
    chain: list[bytes] = []
    root = root_hash(cache.model_key, cache.block_size, adapter=adapter, cache_salt=cache_salt)
    extend_chain(chain, root, token_ids, cache.block_size)
    at = list(accumulate(len(tokenizer.token_bytes(token_id)) for token_id in token_ids))
    nums = [min(bisect_right(at, end) // cache.block_size, len(chain)) for end in ends]
    first = next((num for num in nums if num), None)
    if first is None:
        return b""
    # A piece without a whole block is as good as the first one that has some.
    return b64encode(b"".join(chain[(num or first) - 1][:SHORT_HASH_BYTES] for num in nums))


def piece_ends(body: Mapping[str, Any], piece_bytes: int, rendered: bytes) -> list[int]:
    """Return for each whole piece of the text of ``body`` up to which byte of the prompt it says everything."""
    starts, places, at, pos = [0], [(0, 0)], 0, 0  # start in the text → (place, length) in the prompt
    for text in digested_parts(body):
        content = text.partition(ROLE_END)[2] or text
        stripped = content.strip()
        place_of_text = rendered.find(stripped, pos) if stripped else -1
        if place_of_text >= 0:
            starts.append(at + len(text) - len(content.lstrip()))
            places.append((place_of_text, len(stripped)))
            pos = place_of_text + len(stripped)
        at += len(text) + 1
    ends = []
    for end in range(piece_bytes, min(at - 1, MAX_PIECES * piece_bytes) + 1, piece_bytes):
        last = bisect_right(starts, end) - 1
        place, length = places[last]
        ends.append(place + min(end - starts[last], length))
    return ends
