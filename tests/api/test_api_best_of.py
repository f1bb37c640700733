"""``best_of`` and beam search over a frontend without an engine: what is asked of it, and which answers come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.api.asgi_client import Api, events
from tests.api.fake_frontend import FakeFrontend, say

from quire.request import TokenEvent, TokenLogprobs


class Scored(FakeFrontend):
    """Sample i says ``sample i``; the later ones are likelier but for the last."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, index, seed: say(f"{bytes(prompt).decode()} {index}"))

    def _event(self, output: Any, index: int, ids: Sequence[int], position: int) -> TokenEvent:
        event = super()._event(output, index, ids, position)
        if output.request.sampling.num_top_logprobs is not None and event.logprobs is None:
            event = event._replace(logprobs=(_entry(event.token_ids[0]),))
        mean = (-3.0, -2.0, -0.5, -1.0)[index]
        logprobs = event.logprobs
        return event if logprobs is None else event._replace(logprobs=(logprobs[0]._replace(logprob=mean),))


def _entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, 1, (), ())


def test_the_best_come_first() -> None:
    api = Api(Scored())
    body = api.complete(prompt=["a", "b"], n=2, best_of=4).json()
    assert [c["text"] for c in body["choices"]] == ["a 2", "a 3", "b 2", "b 3"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert all(c["logprobs"] is None for c in body["choices"])
    assert body["usage"]["completion_tokens"] == 2 * 4 * len("a 0\0")
    assert [s.sampling.num_samples for s in api.frontend.submitted] == [4, 4]
    (choice,) = api.complete(prompt="a", best_of=4, logprobs=1, echo=True).json()["choices"]
    assert choice["text"] == "aa 2"
    assert choice["logprobs"]["tokens"][:2] == ["a", "a"]
    (choice,) = api.chat(best_of=3).json()["choices"]
    assert choice["message"]["content"].endswith("2")
    assert choice["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_beams_do_not_take_the_models_defaults(stream: bool) -> None:
    frontend = FakeFrontend()
    assert frontend.model.generation_defaults == {"temperature": 0.5}
    fields: dict[str, Any] = {"n": 2, "best_of": 3, "use_beam_search": True, "stream": stream}
    response = Api(frontend).complete(**fields, length_penalty=0.5, early_stopping="never")
    indexes = {c["index"] for e in (events(response) if stream else [response.json()]) for c in e["choices"]}
    assert indexes == {0, 1}
    (sampling,) = [s.sampling for s in frontend.submitted]
    assert (sampling.num_samples, sampling.beam_width, sampling.greedy) == (2, 3, True)
    assert (sampling.length_penalty, sampling.early_stopping) == (0.5, "never")
