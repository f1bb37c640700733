"""Where checkpoints of a recurrent state lie, and which go first.

A checkpoint of a large model takes the bytes of the keys and values of a thousand tokens, so a prompt has few of them:

    ANSWER    the last block edge of what was generated: the next turn of the conversation begins there
    PROMPT    the last block edge of the prompt: where an answer that is rendered another way begins to differ
    BRANCH    where a prompt leaves the prefix tree with no checkpoint near: the end of a system prompt, say, at its
              second use
    INSIDE    1, 2, 4, 8 … blocks into the answer: a template may write the call of a tool in another way
    BACKWARD  from the prompt's end backwards 1, 2, 4, 8 … blocks: a prompt whose last n tokens differ computes 2 n

ANSWER and PROMPT of a conversation's last turn go last; once its next turn has its own, they are like any other. Of
those, what goes first is unlikely to be used, or saves few tokens, since another is a little before it.

    prompt    │ system prompt … │ … │       │   │ │ │▒        answer │ │   │       │ │▒
              0              BRANCH     BACKWARD  … PROMPT          INSIDE  …        ANSWER    ▒ less than a block
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

# A checkpoint within so many tokens before the place where a prompt leaves the tree is near it. One that saves four
# times as many has half the score of those that save the most.
NEAR_TOKENS = 32


class Kind(Enum):
    """Why there is a checkpoint. The value: how likely it is used again, relative to the others of its age."""

    ANSWER = 64.0
    PROMPT = 63.0
    BRANCH = 16.0
    INSIDE = 4.0
    BACKWARD = 1.0


LAST_KINDS = (Kind.ANSWER, Kind.PROMPT)


class Place(NamedTuple):
    """A place for a checkpoint: after ``num_tokens`` tokens, a multiple of the block size."""

    num_tokens: int
    kind: Kind
    num_saved: int = 0  # tokens since the place before it


def places_of(num_known: int, num_cached: int, num_shared: int, block_size: int) -> list[Place]:
    """Return the places of a sequence that is admitted with ``num_known`` tokens, one per position.

    Its first ``num_cached`` tokens are loaded from a checkpoint; the prefix tree has the blocks of ``num_shared``.
    """
    kinds: dict[int, Kind] = {}
    distance = block_size
    while distance < num_known:
        kinds[(num_known - distance) // block_size * block_size] = Kind.BACKWARD
        distance *= 2
    if num_shared - num_cached > NEAR_TOKENS:
        kinds[num_shared] = Kind.BRANCH
    kinds[num_known // block_size * block_size] = Kind.PROMPT
    ends = sorted(num_tokens for num_tokens in kinds if num_tokens > num_cached)
    return [
        Place(end, kinds[end], end - before) for before, end in zip([num_cached, *ends], ends, strict=False)
    ]


def is_kept(num_tokens: int, num_known: int, block_size: int) -> bool:
    """Whether the checkpoint after ``num_tokens`` stays as its answer, after ``num_known`` tokens, goes on."""
    distance = num_tokens // block_size - num_known // block_size
    return distance & (distance - 1) == 0


def score(kind: Kind, num_hits: int, age: int, num_saved: int) -> float:
    """Return how much a checkpoint is worth; the least goes first.

    ``age``: admissions since its last use. ``num_saved``: tokens that its next use saves.
    """
    saved = 1.0 if kind in LAST_KINDS else num_saved / (num_saved + 4 * NEAR_TOKENS)
    return kind.value * (1 + num_hits) * saved / (1 + age)
