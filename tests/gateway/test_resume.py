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
from quire.models.quill import quill_path

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
        for number, (path, body) in enumerate(asks(24)):
            first = client.post(path, json=body, headers=headers(number))
            assert first.status_code == 200, first.text
            whole = groups(first.content)
            assert whole[-1][0] == b"0"
            cuts = {1, len(whole) - 1, *random.sample(range(1, len(whole)), min(4, len(whole) - 1))}
            for cut in sorted(cuts):
                form = resume_form(body, first.headers["x-quire-tagged"], whole[:cut])
                again = client.post(path, json=form, headers=headers(number, resumes=True))
                assert again.status_code == 200, again.text
                joined = b"".join(events for _, events in [*whole[:cut], *groups(again.content)])
                expected = by_choice(b"".join(events for _, events in whole))
                assert by_choice(joined) == expected, (path, body, cut)
