"""Where checkpoints of a recurrent state lie, and which go first.

A checkpoint of a large model takes the bytes of the keys and values of a thousand tokens, so a prompt has few of them:

    ANSWER    the last block edge of what was generated: the next turn of the conversation begins there
    PROMPT    the last block edge of the prompt: where an answer that is rendered another way begins to differ
    BRANCH    where a prompt leaves the prefix tree with no checkpoint near: the end of a system prompt, say, at its
              second use
    BACKWARD  from the prompt's end backwards 1, 2, 4, 8 … blocks: a prompt whose last n tokens differ computes 2 n

ANSWER and PROMPT of a conversation's last turn go last; once its next turn has its own, they are like any other.

    prompt    │ system prompt … │ … │       │   │ │ │▒        answer │ │▒
              0              BRANCH     BACKWARD  … PROMPT              ANSWER          ▒ less than a block
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

# A checkpoint within so many blocks before the place where a prompt leaves the tree is near it.
NEAR_BLOCKS = 2


class Kind(Enum):
    """Why there is a checkpoint. The value: how likely it is used again, relative to the others of its age."""

    ANSWER = 64.0
    PROMPT = 63.0
    BRANCH = 16.0
    BACKWARD = 1.0


LAST_KINDS = (Kind.ANSWER, Kind.PROMPT)


class Place(NamedTuple):
    """A place for a checkpoint: after ``num_tokens`` tokens, a multiple of the block size."""

    num_tokens: int
    kind: Kind


def places_of(num_known: int, num_cached: int, num_shared: int, block_size: int) -> list[Place]:
    """Return the places of a sequence that is admitted with ``num_known`` tokens, one per position.

    Its first ``num_cached`` tokens are loaded from a checkpoint; the prefix tree has the blocks of ``num_shared``.
    """
    kinds: dict[int, Kind] = {}
    distance = block_size
    while distance < num_known:
        kinds[(num_known - distance) // block_size * block_size] = Kind.BACKWARD
        distance *= 2
    if num_shared - num_cached > NEAR_BLOCKS * block_size:
        kinds[num_shared] = Kind.BRANCH
    kinds[num_known // block_size * block_size] = Kind.PROMPT
    return [Place(num_tokens, kind) for num_tokens, kind in kinds.items() if num_tokens > num_cached]


def score(kind: Kind, num_hits: int, age: int) -> float:
    """Return how likely a checkpoint is used again; the least goes first. ``age``: admissions since its last use."""
    return kind.value * (1 + num_hits) / (1 + age)
