"""What the requests of one session say to the server, as JSON bodies."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from quire.bench.client import Target
from quire.workload.prompts import PromptMaker
from quire.workload.request import WorkloadRequest

_encode = msgspec.json.Encoder().encode


class Conversation:
    """The turns of a session, or one request by itself.

    Token ids (completions) are exact in length, and a later turn holds a made-up answer to the one before. Text (chats,
    and traces that bring their own) holds what the server really answered.
    """

    def __init__(self, target: Target, prompts: PromptMaker, turns: Sequence[WorkloadRequest]) -> None:
        self.turns = turns
        self.as_ids = (
            target.as_ids and target.endpoint == "completions" and all(t.text is None for t in turns)
        )
        self._target = target
        self._prompts = prompts
        self._said: list[str] = []  # user and model in turn
        self._bodies: dict[int, bytes] = {}

    def prepare(self) -> None:
        """Make what can be made before the run: a long prompt would hold up the clients while others are timed."""
        for place in range(len(self.turns) if self.as_ids else 1):
            self._bodies[place] = self._make(place)

    def body(self, place: int) -> bytes:
        """The body of turn ``place``; the turns before it are answered."""
        return self._bodies.pop(place, None) or self._make(place)

    def answered(self, text: str) -> None:
        """Take the model's answer to the last turn."""
        self._said.append(text)

    def _make(self, place: int) -> bytes:
        turn = self.turns[place]
        prompt: object
        if self.as_ids:
            prompt = self._prompts.token_ids(turn)
        else:
            del self._said[2 * place :]
            self._said.append(self._user_text(place))
            if self._target.endpoint == "chat":
                roles = ("user", "assistant")
                prompt = [{"role": roles[i % 2], "content": text} for i, text in enumerate(self._said)]
            else:
                prompt = "\n".join(self._said)
        return _encode(self._target.body(prompt, turn.num_output_tokens))

    def _user_text(self, place: int) -> str:
        turn = self.turns[place]
        if turn.text is not None:
            return turn.text
        return self._prompts.text(turn, start=self.turns[place - 1].num_tokens if place else 0)


def chained(requests: Sequence[WorkloadRequest]) -> list[list[WorkloadRequest]]:
    """The sessions in order of their first arrival, each with its turns in order; a request without one is alone."""
    chains: dict[Hashable, list[WorkloadRequest]] = {}
    for request in requests:
        chains.setdefault(request.index if request.session is None else (request.session,), []).append(
            request
        )
    for turns in chains.values():
        turns.sort(key=lambda r: r.turn)
    return list(chains.values())
