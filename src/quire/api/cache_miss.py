"""Where a prompt leaves the prompts that the cache may have: `miss_reason` of the ``timing`` block.

The engine says how many tokens came from the cache, in whole blocks. The exact token follows from the prompts that the
same caller asked for ``timing`` with: those are remembered here, up to a number of tokens. No prompt of another tenant,
cache salt or adapter is compared, since the answer would tell what it held.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.tokenizer import Tokenizer

# Of what `CacheManager.miss_of` says: the prompt could have had more from the cache.
_MISSES = ("not in the cache", "not in the cache from there on")
# Bytes per remembered token.
_WIDTH = array("I").itemsize


class RecentPrompts:
    """Token ids of prompts, by caller. The oldest go first."""

    def __init__(self, max_prompts: int = 512, max_tokens: int = 2**21) -> None:
        self._max_prompts, self._max_bytes = max_prompts, max_tokens * _WIDTH
        self._num_bytes = 0
        # (caller, token ids as an array's bytes), oldest first
        self._prompts: dict[tuple[Any, bytes], None] = {}

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_tokens(self) -> int:
        return self._num_bytes // _WIDTH

    def compare(self, caller: Any, token_ids: Sequence[int]) -> tuple[int, bool]:
        """Return how many leading tokens an earlier prompt of ``caller`` has in common, and whether it ends there.

        Then remember the prompt, in place of one that it continues.
        """
        prompt = array("I", token_ids).tobytes()
        most, best = 0, b""
        for owner, earlier in self._prompts:
            if owner == caller and (num_common := _num_common(earlier, prompt)) >= max(most, 1):
                most, best = num_common, earlier
        is_whole = most > 0 and most * _WIDTH == len(best)
        if is_whole:
            self._forget((caller, best))
        if (caller, prompt) not in self._prompts:
            self._prompts[caller, prompt] = None
            self._num_bytes += len(prompt)
        while len(self._prompts) > self._max_prompts or self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._prompts)))
        return most, is_whole

    def _forget(self, entry: tuple[Any, bytes]) -> None:
        del self._prompts[entry]
        self._num_bytes -= len(entry[1])


def _num_common(a: bytes, b: bytes) -> int:
    """Return how many leading tokens are equal."""
    low, high = 0, min(len(a), len(b)) // _WIDTH
    view_a, view_b = memoryview(a), memoryview(b)
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * _WIDTH, middle * _WIDTH)
        if view_a[part] == view_b[part]:
            low = middle
        else:
            high = middle - 1
    return low


def miss_reason(
    recent: RecentPrompts,
    caller: Any,
    token_ids: Sequence[int],
    num_cached: int,
    cache_miss: str,
    block_size: int,
) -> dict[str, Any] | None:
    """Return why tokens behind ``num_cached`` were computed, and the first of them that was missed; None: no miss.

    changed      an earlier prompt goes on with another token
    appended     an earlier prompt ends there, and this one continues it
    not_kept     an earlier prompt has these tokens, but the cache does not: they were evicted, or no state was kept
    unseen       no earlier prompt of the caller is known to have as many tokens in common as came from the cache
    """
    num_common, is_whole = recent.compare(caller, token_ids)
    if cache_miss not in _MISSES:
        return None
    if num_common >= min(num_cached // block_size * block_size + block_size, len(token_ids)):
        reason, token = "not_kept", num_cached
    elif is_whole:
        reason, token = "appended", max(num_common, num_cached)
    elif num_common > 0 and num_common >= num_cached:
        reason, token = "changed", num_common
    else:
        reason, token = "unseen", num_cached
    return {"reason": reason, "token": token}


def located(
    token: int,
    token_ids: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    num_shown: int = 8,
) -> dict[str, Any]:
    """Return the text from ``token`` on, and the number of the first message that is not wholly before it.

    ``message`` is None where the prompt was not made of messages, and where all of them are before the token.
    """
    text = tokenizer.decode(token_ids[token : token + num_shown], skip_special_tokens=False, continues=True)
    if not messages:
        return {"text": text, "message": None}
    before, end = tokenizer.decode(token_ids[:token], skip_special_tokens=False), 0
    for number, message in enumerate(messages):
        content = message.get("content")
        at = before.find(content.strip(), end) if isinstance(content, str) else -1
        if at < 0:
            return {"text": text, "message": number}
        assert isinstance(content, str)
        end = at + len(content.strip())
    return {"text": text, "message": None}
