"""`StageLinks`: hidden states from one pipeline stage to the next, over a stream socket.

A step sends one message: its number of tokens, then ``delta`` in the model's dtype and ``residual`` in fp32, each
``[num_tokens, hidden_size]``. Both are sent: a layer that reads their sum rounded would get other bits from the sum
alone. Behind them go the inputs of layers that EAGLE-3 reads.

A socket is the right channel for a message per step: a stage that waits does not spin, the death of its neighbour is an
end of file, and the next stage may be on another machine.
"""

from __future__ import annotations

import socket
import struct

import torch
from torch import Tensor

from quire.clock import Clock
from quire.errors import EngineDeadError
from quire.models.decoder import Hidden

_HEAD = struct.Struct("<q")


class StageLinks:
    """The links of one rank. ``before``, ``after``: sockets to the ranks of the stages beside it; None: none there."""

    def __init__(
        self,
        before: socket.socket | None,
        after: socket.socket | None,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        clock: Clock,
        num_taps: int = 0,
    ) -> None:
        """``num_taps``: inputs of layers before this stage that drafting heads read."""
        self._before, self._after, self._clock = before, after, clock
        self.num_bytes_sent = 0
        self.waited_s = 0.0  # for the other stages
        # Where `receive` leaves the hidden states: a recorded step reads them there.
        self.entering: Hidden | None = None
        if before is not None:
            dtypes = dtype, torch.float32, *[dtype] * num_taps
            self.entering = tuple(torch.empty(max_tokens, hidden_size, dtype=dtype) for dtype in dtypes)

    def room_for(self, max_tokens: int) -> Hidden | None:
        """Return where `receive` leaves steps of at most ``max_tokens``; None on the first stage.

        A recorded step tells the rows of tokens from those that give logits by their number, so what it reads must have
        as many rows as its own buffers.
        """
        if self.entering is not None and self.entering[0].shape[0] != max_tokens:
            self.entering = tuple(torch.empty(max_tokens, *x.shape[1:], dtype=x.dtype) for x in self.entering)
        return self.entering

    def receive(self, num_tokens: int) -> Hidden | None:
        """Wait for the hidden states of the next step, which has ``num_tokens``; None on the first stage.

        Raises:
            EngineDeadError: the stage before has ended.
        """
        if self._before is None:
            return None
        assert self.entering is not None
        if num_tokens > self.entering[0].shape[0]:  # beyond what is recorded
            entering = tuple(torch.empty(num_tokens, *x.shape[1:], dtype=x.dtype) for x in self.entering)
        else:
            entering = tuple(x[:num_tokens] for x in self.entering)
        head, start_s = bytearray(_HEAD.size), self._clock.now()
        _read(self._before, memoryview(head))
        self.waited_s += self._clock.now() - start_s
        assert _HEAD.unpack(head)[0] == num_tokens, "stages compute the same steps"
        for x in entering:
            _read(self._before, _bytes(x))
        return entering

    def send(self, hidden: Hidden, num_tokens: int) -> None:
        """Send the hidden states of a step to the next stage.

        Raises:
            EngineDeadError: the next stage has ended.
        """
        assert self._after is not None
        start_s = self._clock.now()
        _write(self._after, _HEAD.pack(num_tokens))
        delta, residual, *seen = hidden
        for x in (delta, residual.float(), *seen):
            rows = x[:num_tokens].contiguous()
            _write(self._after, _bytes(rows))
            self.num_bytes_sent += rows.nbytes
        self.waited_s += self._clock.now() - start_s

    def all_of(self, fine: bool) -> bool:
        """Return whether ``fine`` is true on every stage; each of them must ask, at the same place among its steps.

        Raises:
            EngineDeadError: a stage has ended.
        """
        flags = bytearray([fine])
        if self._before is not None:
            _read(self._before, memoryview(flags))
            flags[0] &= fine
        if self._after is not None:
            _write(self._after, flags)
            _read(self._after, memoryview(flags))
        if self._before is not None:
            _write(self._before, flags)
        return bool(flags[0])

    @property
    def is_last(self) -> bool:
        return self._after is None


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return x.view(torch.uint8).numpy().data.cast("B")


def _write(sock: socket.socket, data: bytes | bytearray | memoryview) -> None:
    try:
        sock.sendall(data)
    except OSError as error:
        raise EngineDeadError(f"A pipeline stage beside this one has ended: {error}") from error


def _read(sock: socket.socket, into: memoryview) -> None:
    got = 0
    while got < len(into):
        try:
            count = sock.recv_into(into[got:])
        except OSError as error:
            raise EngineDeadError(f"A pipeline stage beside this one has ended: {error}") from error
        if not count:
            raise EngineDeadError("A pipeline stage beside this one has ended.")
        got += count
