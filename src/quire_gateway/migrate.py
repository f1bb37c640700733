"""`Continuation`: what lets another replica of Quire continue a stream whose replica died.

    replica A  ──  :57 [0,[812],16,null,null,null] ⏎ data: … ⏎⏎  ──>  gateway  ── data: … ⏎⏎ ──>  client
    replica B  <──  the client's body and all tags so far  ──  gateway

The tags are those of `quire.api.relayed`. The gateway keeps them as they come and reads only their lengths. The client
gets whole groups, and the tags of these alone are kept. Replica B feeds what they cover to its parsers without sending,
so its stream is the rest of A's: the same id, time, seed and cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.http.account import cost_of
from quire_gateway.frames import MAX_FRAME_BYTES, StreamMoves

MAX_TAG_BYTES = 1 << 20  # of a stream's tags that are kept; a longer stream cannot be continued
_MOVES = 503  # status of an error event that another replica can answer better: shutdown, a dead engine


@dataclass(slots=True, eq=False)
class Continuation:
    """The answer of one request, as far as another replica needs it."""

    answer_id: str  # 32 hexadecimal digits
    created: int  # seconds since 1970
    seed: int  # of a request that gives none
    fingerprint: str = ""  # of the replica that began the stream; empty: the stream is not tagged
    cost: tuple[float, float] = (0.0, 0.0)  # of the last replica, if it said so at the end
    num_in_vain: int = 0  # attempts since the stream last moved on
    _tags: list[bytes] = field(default_factory=list)
    _num_bytes: int = 0
    _num_told: int = 0  # tags at the last `has_moved`

    @property
    def can_move(self) -> bool:
        """Whether another replica with the same fingerprint can go on."""
        return bool(self.fingerprint) and self._num_bytes <= MAX_TAG_BYTES

    def has_moved(self) -> bool:
        """Whether the stream has gone on since the last call."""
        before, self._num_told = self._num_told, len(self._tags)
        return self._num_told > before

    def restart(self) -> None:
        """The client has nothing yet, and the next attempt begins the answer."""
        self._tags.clear()
        self._num_bytes = self._num_told = 0

    def keep(self, tag: bytes) -> None:
        """The client gets the group of ``tag``."""
        self._num_bytes += len(tag) + 1
        if self._num_bytes > MAX_TAG_BYTES:
            self._tags.clear()
        else:
            self._tags.append(tag)

    def groups(self, fingerprint: str) -> Groups:
        """Return what cuts the stream of a replica with this fingerprint into whole groups."""
        self.fingerprint = fingerprint
        return Groups(self)

    def headers(self, key: str, *, resumes: bool) -> list[tuple[str, str]]:
        """Return what goes to a replica with the request. ``key``: the gateway's."""
        named = [
            ("x-quire-gateway-key", key),
            ("x-quire-answer", f"{self.answer_id} {self.created} {self.seed}"),
        ]
        return [*named, ("x-quire-resume", "1")] if resumes else named

    def body(self, request: bytes, elapsed_s: float) -> bytes:
        """Return the resume form of the client's body."""
        form = b'{"fingerprint":"%b","elapsed_s":%.3f,"delivered":[%b],"request":%b}'
        return form % (self.fingerprint.encode(), elapsed_s, b",".join(self._tags), request)


class Groups:
    """Takes the tags out of a replica's stream; `Frames` for tagged streams."""

    def __init__(self, continuation: Continuation) -> None:
        self._continuation = continuation
        self._rest = b""
        self._has_ended = False
        self._moves = False

    def feed(self, data: bytes) -> bytes:
        """Return the events of the groups that are whole, and keep their tags.

        Raises:
            ValueError: the stream is not tagged as it should be.
            StreamMoves: another replica has to go on.
        """
        if self._moves:
            raise StreamMoves
        data = self._rest + data if self._rest else data
        at, groups = 0, []
        while (end := data.find(b"\n", at)) >= 0:
            length, _, tag = data[at:end].partition(b" ")
            if length[:1] != b":" or not length[1:].isdigit():
                raise ValueError("a tag is missing")
            start = end + 1
            stop = start + int(length[1:])
            if stop > len(data):
                break
            if tag[:1] == b"[":
                self._continuation.keep(tag)
            elif int((status := tag.split(b" ", 1))[0]) == _MOVES and self._continuation.can_move:
                self._moves = True
                break
            else:
                self._has_ended = True
                if len(status) > 1:
                    self._continuation.cost = cost_of(status[1].decode("ascii"))
            groups.append(data[start:stop])
            at = stop
        self._rest = data[at:]
        if len(self._rest) > MAX_FRAME_BYTES:
            raise ValueError(f"a group has more than {MAX_FRAME_BYTES} bytes")
        if self._moves and not groups:
            raise StreamMoves
        return groups[0] if len(groups) == 1 else b"".join(groups)

    def end(self) -> bytes:
        """Check that the stream is at its end.

        Raises:
            ValueError: it has broken off.
            StreamMoves: another replica has to go on.
        """
        if self._moves:
            raise StreamMoves
        if not self._has_ended:
            raise ValueError("it ends in the middle")
        return b""
