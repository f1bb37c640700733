"""The fake model: a hash in place of a forward pass, so that what is in the pages decides the next token.

`chain` is the state after each token: a function of every token before it, as K/V of a real model are. `fake_tokens`
is the oracle: the same tokens with no cache, no batch and no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.request import Adapter, Pooling, Sampling, TokenLogprobs

MASK = (1 << 64) - 1
_SEED = 0x9E3779B97F4A7C15
_ODD = 0xD6E8FEB86659FD93


@dataclass(frozen=True, slots=True)
class FakeModel:
    """``eos_probability``: chance that a token is the first of ``sampling.eos_token_ids`` (0 without any)."""

    vocab_size: int = 1000
    eos_probability: float = 0.02

    def token(self, state: int, sampling: Sampling, sample_index: int, num_output: int) -> int:
        """Return the token drawn after a context with this ``state``; ``num_output`` tokens were drawn before."""
        noise = mix(state, 0 if sampling.greedy else mix((sampling.seed or 0) & MASK, sample_index + 1))
        may_end = bool(sampling.eos_token_ids) and num_output >= sampling.min_tokens
        if may_end and (noise >> 32) < self.eos_probability * 2**32:
            return sampling.eos_token_ids[0]
        allowed = sampling.allowed_token_ids
        token_id = allowed[noise % len(allowed)] if allowed else noise % self.vocab_size
        if num_output < sampling.min_tokens:
            barred = {*sampling.eos_token_ids, *sampling.stop_token_ids}
            while token_id in barred:
                token_id = (token_id + 1) % self.vocab_size
        return token_id

    def pooled(self, state: int, pooling: Pooling) -> tuple[float, ...]:
        """Return four made-up numbers of a prompt, or one for each of ``pooling.token_ids``."""
        if pooling.kind == "logprobs":
            return tuple(self.logprobs(state, 0, token_id).logprob for token_id in pooling.token_ids)
        return tuple((mix(state, i) % 1000) / 500.0 - 1.0 for i in range(4))

    def logprobs(self, state: int, count: int, token_id: int) -> TokenLogprobs:
        """Return made-up log-probabilities that depend on the context and the token only; ``count`` alternatives."""
        first, distance = mix(state, 3), 1 + 2 * (mix(state, 5) % (self.vocab_size // 2))
        top = tuple((first + i * distance) % self.vocab_size for i in range(count))
        down = 1.0 + mix(state, 7) % 100 / 100.0  # from one to the next
        return TokenLogprobs(
            token_id,
            -(mix(state, token_id) % 1000) / 100.0,
            1 + mix(state, token_id) % self.vocab_size,
            top,
            tuple(-(i + 1) * down for i in range(count)),
        )


def mix(a: int, b: int) -> int:
    """Return a 64-bit hash of two numbers."""
    x = (a ^ (b * _SEED)) & MASK
    x = ((x ^ (x >> 32)) * _ODD) & MASK
    x = ((x ^ (x >> 29)) * _SEED) & MASK
    return x ^ (x >> 32)


def next_state(state: int, position: int, token_id: int) -> int:
    """Return the state after ``token_id`` at ``position``."""
    return mix(state, position << 32 | token_id)


def start_state(adapter: Adapter | None) -> int:
    """Return the state before the first token: that of the base model, or one that the adapter's content gives."""
    if adapter is None:
        return 0
    state = 1
    for byte in adapter.key.encode():
        state = mix(state, byte)
    return state


def chain(token_ids: Sequence[int], state: int = 0, start: int = 0) -> list[int]:
    """Return the state after each of ``token_ids``, the first of which is at position ``start``."""
    states = []
    for position, token_id in enumerate(token_ids, start):
        state = next_state(state, position, token_id)
        states.append(state)
    return states


def fake_tokens(
    prompt_token_ids: Sequence[int],
    sampling: Sampling,
    sample_index: int,
    num_tokens: int,
    model: FakeModel | None = None,
    adapter: Adapter | None = None,
) -> list[int]:
    """Return the first ``num_tokens`` output tokens, past any stop id: what every path of the engine must give."""
    model = model or FakeModel()
    states = chain(prompt_token_ids, start_state(adapter))
    state, output = states[-1], []
    for num_output in range(num_tokens):
        token_id = model.token(state, sampling, sample_index, num_output)
        output.append(token_id)
        state = next_state(state, len(prompt_token_ids) + num_output, token_id)
    return output
