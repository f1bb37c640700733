"""A replica continues a stream from any of its points, in every dialect, as the replica that began it would have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest
from tests.e2e.live import LiveServer
from tests.gateway.asks import asks, by_choice

from quire.errors import ModelLoadError
from quire.models.hub import quill_path

KEY = "the-gateway's"
Group = tuple[bytes, bytes]  # tag, events


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    try:
        quill_path("quill")
    except ModelLoadError as error:
        pytest.skip(str(error))
    log = tmp_path_factory.mktemp("replica") / "log"
    command = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1", "--gateway-key", KEY]
    command += ["--tool-format", "hermes"]
    with LiveServer(command, log) as live:
        yield live


def headers(number: int, *, key: str = KEY, resumes: bool = False) -> dict[str, str]:
    named = {"x-quire-gateway-key": key, "x-quire-answer": f"{number:032x} 1700000000 {number}"}
    return named | ({"x-quire-resume": "1"} if resumes else {})


def groups(stream: bytes) -> list[Group]:
    found, at = [], 0
    while at < len(stream):
        end = stream.index(b"\n", at)
        length, _, tag = stream[at + 1 : end].partition(b" ")
        at = end + 1 + int(length)
        found.append((tag, stream[end + 1 : at]))
    return found


def resume_form(body: dict[str, Any], fingerprint: str, given: list[Group]) -> dict[str, Any]:
    delivered = [json.loads(tag) for tag, _ in given]
    return {"request": body, "fingerprint": fingerprint, "elapsed_s": 0.5, "delivered": delivered}


def test_any_stream_goes_on_from_any_point(replica: LiveServer) -> None:
    random = Random(5)
    with httpx.Client(base_url=replica.url, timeout=60) as client:
        for number, (path, body) in enumerate(asks(16)):
            first = client.post(path, json=body, headers=headers(number))
            assert first.status_code == 200, first.text
            whole = groups(first.content)
            assert whole[-1][0] == b"0"
            cuts = {1, len(whole) - 1, *random.sample(range(1, len(whole)), min(2, len(whole) - 1))}
            for cut in sorted(cuts):
                form = resume_form(body, first.headers["x-quire-tagged"], whole[:cut])
                again = client.post(path, json=form, headers=headers(number, resumes=True))
                assert again.status_code == 200, again.text
                joined = b"".join(events for _, events in [*whole[:cut], *groups(again.content)])
                expected = by_choice(b"".join(events for _, events in whole))
                assert by_choice(joined) == expected, (path, body, cut)


def test_without_the_key_the_headers_have_no_effect(replica: LiveServer) -> None:
    path, body = asks(4)[0]
    with httpx.Client(base_url=replica.url, timeout=60) as client:
        answer = client.post(path, json=body, headers=headers(1, key="another"))
        assert answer.status_code == 200
        assert "x-quire-tagged" not in answer.headers
        assert answer.content.startswith(b"data: ")
        assert b"cmpl-" + b"%032x" % 1 not in answer.content
        form = resume_form(body, "x", [])
        refused = client.post(path, json=form, headers=headers(1, key="another", resumes=True))
        assert refused.status_code == 400


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fingerprint": "another"}, "fingerprint_differs"),
        ({"delivered": [[9, [1], 0]]}, "choice 9"),
        ({"delivered": [[0, [10**6], 0]]}, "vocabulary"),
        ({"delivered": [[0, [1], 0, "stop", 2]]}, "stop token"),
        ({"delivered": [[0, [1] * 99, 0]]}, "max_tokens"),
        ({"delivered": [[0, [1], 0, "length"], [0, [1], 0]]}, "ended before"),
        ({"delivered": [[0, "a", 0]]}, "resume form"),
        ({"delivered": None}, "resume form"),
    ],
)
def test_a_wrong_resume_form_is_refused(replica: LiveServer, changes: dict[str, Any], says: str) -> None:
    path, body = asks(8)[0]
    with httpx.Client(base_url=replica.url, timeout=60) as client:
        cards = client.get("/v1/models").json()["data"]
        form = resume_form(body, cards[0]["fingerprint"], []) | changes
        refused = client.post(path, json=form, headers=headers(1, resumes=True))
        assert refused.status_code == 400
        assert says in refused.text


def test_logprobs_of_the_prompt_are_not_tagged(replica: LiveServer) -> None:
    path, body = asks(4)[2]
    with httpx.Client(base_url=replica.url, timeout=60) as client:
        answer = client.post(path, json={**body, "echo": True}, headers=headers(2))
        assert answer.status_code == 200
        assert "x-quire-tagged" not in answer.headers
