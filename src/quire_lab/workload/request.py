"""`WorkloadRequest` and `Workload`: requests before they are served, and `PromptMaker`: their contents.

Contents are token ids or text and depend only on the seed. Where a request has hashes, equal hashes give equal tokens.
The tokens after them belong to its session, or to the request alone; a later turn of a session begins with the whole
previous turn, whose answer is made up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request: its send time, its lengths, its shared prefix. `PromptMaker` makes its content."""

    arrival_s: float  # intended send time, since the start of the run
    num_prompt_tokens: int  # for a later turn: those of the whole conversation so far
    num_output_tokens: int
    index: int = 0  # position in the workload
    hash_ids: tuple[int | str, ...] = ()  # one per block; equal ids at the front mean an equal prefix
    # Tokens per hash; the end of the prompt may cut the last block.
    hash_block_size: int = 0
    session: str | None = None
    turn: int = 0  # turn of its session, sent after the previous answer
    think_s: float = 0.0  # seconds between that answer's last token and this turn
    text: str | None = None  # the user's message, where the trace has it
    cancel_after_tokens: int | None = None  # the client leaves after this many tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens: the context that the request needs."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, and the rows of the source that are not among them."""

    requests: tuple[WorkloadRequest, ...]
    refused: Mapping[str, int]  # reason → rows of the source that were left out
    source: str  # for the report: the trace's name, or the distributions


# Short and common, so that most tokenizers have each as one token with the blank before it.
_WORDS = tuple((files("quire_lab.workload") / "words.txt").read_text().split())
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class PromptMaker:
    """Makes token ids in ``first_id``…``vocab_size − 1``, or words, for the requests of one workload."""

    def __init__(self, vocab_size: int, seed: int = 0, first_id: int = 0) -> None:
        if not 0 <= first_id < vocab_size:
            raise ConfigError(f"there are no token ids from {first_id} to vocab_size = {vocab_size!r}")
        self._first_id, self._num_ids = first_id, vocab_size - first_id
        self._seed = seed

    def token_ids(self, request: WorkloadRequest) -> list[int]:
        """Return the prompt: ``num_prompt_tokens`` ids."""
        parts = [self._first_id + _below(bits, self._num_ids) for bits in self._bits(request)]
        ids: list[int] = (parts[0] if len(parts) == 1 else np.concatenate(parts)).tolist()
        return ids

    def text(self, request: WorkloadRequest, start: int = 0) -> str:
        """Return the prompt from token ``start`` on as words of about one token each."""
        places = np.concatenate([_below(bits, len(_WORDS)) for bits in self._bits(request)])[start:]
        return " ".join(_WORDS[i] for i in places.tolist())

    def _bits(self, request: WorkloadRequest) -> Iterator[np.ndarray]:
        """Yield 64 random bits per token, block by block."""
        done, end = 0, request.num_prompt_tokens
        for hash_id in request.hash_ids:
            size = min(request.hash_block_size, end - done)
            if size > 0:
                yield _stream(self._key("hash", hash_id), 0, size)
                done += size
        if done < end:
            own = request.index if request.session is None else request.session
            yield _stream(self._key("own", own), done, end)

    def _key(self, kind: str, name: int | str) -> np.uint64:
        text = f"{self._seed}/{kind}/{type(name).__name__}/{name}"
        return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def _stream(key: np.uint64, start: int, end: int) -> np.ndarray:
    """Return outputs ``start``…``end − 1`` of splitmix64 (Steele et al. 2014) for seed ``key``, [end − start]."""
    z = np.arange(start + 1, end + 1, dtype=np.uint64)
    z *= _GOLDEN
    z += key
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def _below(bits: np.ndarray, num: int) -> np.ndarray:
    """Return random integers below ``num`` (at most 2³¹) from the upper 32 bits: int64."""
    return (((bits >> np.uint64(32)) * np.uint64(num)) >> np.uint64(32)).astype(np.int64)
