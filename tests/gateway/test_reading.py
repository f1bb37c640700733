"""What the gateway reads of texts, frames, usage and headers, without sockets."""

from __future__ import annotations

import json
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import NotFoundError, RequestError
from quire.http.refusals import Refusal
from quire.text.digest import digested_text, digests, root_of
from quire_gateway.catalog import Catalog
from quire_gateway.config_file import gateway_config
from quire_gateway.frames import MAX_FRAME_BYTES, Frames, error_frame
from quire_gateway.headers import to_backend, to_client
from quire_gateway.ttft import TtftModel
from quire_gateway.usage import Usage


def chain(body: dict[str, Any], model: str = "m", salt: str = "") -> list[bytes]:
    return digests(root_of(model, salt), digested_text(body), 64)


def turns(num: int) -> dict[str, Any]:
    said = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i} " * 20} for i in range(num)]
    return {"messages": [{"role": "system", "content": "Be kind. " * 30}, *said]}


def test_a_later_turn_shares_the_whole_pieces_before_it() -> None:
    short, long = chain(turns(1)), chain(turns(3))
    assert short == long[: len(short)]
    assert len(long) > len(short) >= 6
    assert not set(chain(turns(3), model="other")) & set(long)
    assert not set(chain(turns(3), salt="tenant")) & set(long)


def test_a_change_ends_what_is_shared() -> None:
    changed = turns(3)
    changed["messages"][2]["content"] = changed["messages"][2]["content"].replace("turn 1", "Turn 1", 1)
    before, after = chain(turns(3)), chain(changed)
    shared = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
    assert 0 < shared < len(before)
    assert not set(before[shared:]) & set(after[shared:])


def test_tools_come_between_system_and_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    text = digested_text(turns(1) | {"tools": tools})
    assert text.index(b"Be kind") < text.index(b'"function"') < text.index(b"turn 0")
    assert digested_text({"instructions": "a", "input": "b"}) == b"a\0b"
    assert digested_text({"system": [{"type": "text", "text": "a"}], "messages": []}).startswith(b"[{")
    assert digested_text({"prompt": [1, 2, 3]}) == b"[1,2,3]"
    assert digested_text({"prompt": "lone \ud800"}) == "lone \ud800".encode("utf-8", "surrogatepass")


@given(
    texts=st.lists(st.sampled_from([b"data: a", b"event: x\ndata: b", b": ping", b"data: " + b"c" * 50]), max_size=8),
    ends=st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    cuts=st.lists(st.integers(0, 400), max_size=12),
    rest=st.sampled_from([b"", b"data: half"]),
)  # fmt: skip
def test_frames_are_whole_however_the_bytes_arrive(
    texts: list[bytes], ends: bytes, cuts: list[int], rest: bytes
) -> None:
    stream = b"".join(text + ends for text in texts) + rest
    frames, out = Frames(), b""
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for start, end in pairwise(places):
        whole = frames.feed(stream[start:end])
        assert not whole or whole.endswith((b"\n\n", b"\r\n\r\n"))
        out += whole
    assert out + frames.end() == stream
    assert frames.end() == rest


def test_a_frame_without_end_is_refused() -> None:
    frames, piece = Frames(), b"x" * 65536
    for _ in range(MAX_FRAME_BYTES // len(piece)):
        assert not frames.feed(piece)
    with pytest.raises(ValueError, match="a frame has more than"):
        frames.feed(piece)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_an_error_frame_is_one_frame_of_its_dialect(path: str) -> None:
    frame = error_frame(path, Refusal(502, "It broke.", code="backend_broken"))
    assert frame.endswith(b"\n\n")
    assert frame.count(b"\n\n") == 1
    value = json.loads(frame.partition(b"data: ")[2])
    assert "It broke." in json.dumps(value)
    assert frame.startswith(b"data: ") == (path == "/v1/chat/completions")


@pytest.mark.parametrize(
    "frames",
    [
        b'data: {"id":"c-1","choices":[]}\n\ndata: {"id":"c-1","choices":[],"usage":{"prompt_tokens":9,'
        b'"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}\n\ndata: [DONE]\n\n',
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"c-1","usage":{"input_tokens":9,'
        b'"cache_read_input_tokens":2,"output_tokens":1}}}\n\nevent: message_delta\n'
        b'data: {"type":"message_delta","usage":{"output_tokens":4}}\n\n',
        b'data: {"type":"response.created","response":{"id":"c-1","usage":null}}\n\n'
        b'data: {"type":"response.completed","response":{"id":"c-1","usage":{"input_tokens":9,"output_tokens":4,'
        b'"input_tokens_details":{"cached_tokens":2}}}}\n\n',
    ],
    ids=["openai", "anthropic", "responses"],
)
def test_usage_is_read_from_every_dialect(frames: bytes) -> None:
    usage = Usage()
    for frame in frames.split(b"\n\n"):
        usage.read_frames(frame + b"\n\n")
    assert usage == Usage(prompt_tokens=9, cached_tokens=2, output_tokens=4, answer_id="c-1")


def test_an_answer_that_is_no_json_is_told_from_odd_json() -> None:
    assert Usage().read(b'{"usage": "lots"}')
    assert Usage().read(b"[1]")
    assert not Usage().read(b'{"usage": ')
    assert not Usage().read(b"\xff")


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "headers": list(headers), "client": ("10.0.0.9", 5)}


def test_headers_to_a_backend() -> None:
    given = scope(
        (b"connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"authorization", b"Bearer c"), (b"accept", b"*/*"),
        (b"x-quire-resume", b"forged"), (b"x-forwarded-for", b"1.2.3.4"), (b"content-length", b"5"),
    )  # fmt: skip
    sent = dict(to_backend(given, "id", None, pass_keys=True, trace_id="a" * 32))
    assert sent["authorization"] == "Bearer c"
    assert sent["x-forwarded-for"] == "1.2.3.4, 10.0.0.9"
    assert not {"connection", "x-hop", "x-quire-resume", "content-length"} & set(sent)
    assert "authorization" not in dict(to_backend(given, "id", None, pass_keys=False, trace_id="a" * 32))
    assert (
        dict(to_backend(given, "id", "own", pass_keys=True, trace_id="a" * 32))["authorization"]
        == "Bearer own"
    )


def test_headers_to_a_client_cannot_carry_a_line_of_their_own() -> None:
    raw = [(b"X-Good", b"1"), (b"x-bad", b"1\r\nset-cookie: a=b"), (b"Transfer-Encoding", b"chunked")]
    assert to_client(raw) == [(b"x-good", b"1")]


def test_a_split_follows_its_weights_and_a_default_is_told() -> None:
    config = gateway_config({"models": [{"name": "a", "split": {"v1": 9, "v2": 1}, "fallbacks": ["b", "c"]},
                                   {"name": "b", "split": {"v3": 1}}]})  # fmt: skip
    catalog = Catalog(config.models, None, lambda: ["v1", "v2", "v3"], Random(1))
    picked = [catalog.targets("a")[0].model for _ in range(1000)]
    assert 850 < picked.count("v1") < 950
    assert [t.model for t in catalog.targets("a")[1:]] == ["v3", "c"]
    with pytest.raises(NotFoundError, match=r"The model 'v4' is not served here.*'v1'"):
        catalog.targets("v4")
    with pytest.raises(RequestError, match="model is required: it must be one of 'a', 'b'"):
        catalog.targets(None)
    for name in (None, "tgi", "dummy"):  # huggingface_hub sends one of the two
        assert Catalog({}, None, lambda: ["x"], Random(1)).targets(name)[0].model == "x"
    assert Catalog(config.models, "b", list, Random(1)).targets(None)[0].model == "v3"


def test_the_pace_of_a_replica_is_learned() -> None:
    model, rng = TtftModel(), Random(3)
    for _ in range(300):
        tokens = rng.randrange(10, 4000)
        model.observe(0, tokens, 0.02 + 5e-4 * tokens + rng.gauss(0, 0.01))
        model.observe(1, 100, 0.5)  # equal prompts say nothing of a slope
    assert model.predict(0, 1000) == pytest.approx(0.52, rel=0.05)
    assert model.predict(1, 100) == pytest.approx(0.5, rel=0.05)
    assert model.predict(2, 1000) == pytest.approx(0.1)
    model.forget(0)
    assert model.predict(0, 1000) == pytest.approx(0.1)
