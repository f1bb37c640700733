"""Training windows: which tokens each optimizer step sees, as a pure function of (seed, position).

The novels are cut into windows of ``length`` tokens, visited once per epoch in a seeded order that changes with every
epoch, at a seeded offset. Every window opens with ``<|bos|>``, as every prompt does when the model is served.
A share of the windows comes from the conversations instead.

    window    bos t0 t1 ... t[n-2]      ids
    targets    t0 t1 t2 ... t[n-1]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from make_data import BOS_ID
from torch import Tensor


class WindowStream:
    """Windows of one token file; ``num_tokens_drawn`` is the whole state. Processes take turns, and share no window."""

    def __init__(self, path: Path, seed: int, rank: int, world: int) -> None:
        self.tokens = np.load(path)
        self.seed = seed
        self.rank, self.world = rank, world
        self.num_tokens_drawn = 0
        self._epoch_key: tuple[int, int] | None = None
        self._order = np.zeros(0, dtype=np.int64)

    def draw(self, length: int) -> np.ndarray:
        """One window of ``length`` tokens, uint16."""
        num_windows = (self.tokens.size - length) // length
        epoch, index = divmod(self.num_tokens_drawn // length * self.world + self.rank, num_windows)
        if self._epoch_key != (epoch, length):
            rng = np.random.default_rng([self.seed, epoch, length])
            self._order = rng.permutation(num_windows) * length + rng.integers(length)
            self._epoch_key = (epoch, length)
        self.num_tokens_drawn += length
        start = int(self._order[index])
        return self.tokens[start : start + length]


class Batches:
    def __init__(self, data: Path, seed: int, chat_share: float, rank: int, world: int) -> None:
        self.text = WindowStream(data / "text.npy", seed, rank, world)
        self.chat = WindowStream(data / "chat.npy", seed + 1, rank, world)
        self.chat_share = chat_share

    def draw(self, num_windows: int, length: int) -> tuple[Tensor, Tensor]:
        """ids, targets: [num_windows, length] int64."""
        rows = []
        for _ in range(num_windows):
            drawn = self.chat.num_tokens_drawn + self.text.num_tokens_drawn + length
            behind = self.chat.num_tokens_drawn + length <= self.chat_share * drawn
            rows.append((self.chat if behind else self.text).draw(length))
        targets = torch.from_numpy(np.stack(rows).astype(np.int64))
        ids = torch.cat([torch.full((num_windows, 1), BOS_ID), targets[:, :-1]], dim=1)
        return ids, targets
