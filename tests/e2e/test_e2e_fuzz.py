"""Whatever fits (and does not fit) the API's own description: no 5xx, no hang, and every block free at the end.

`make fuzz` runs it, 20,000 requests long; ``FUZZ_REQUESTS`` and ``FUZZ_SEED`` change that. Requests go to a real
frontend, scheduler and cache over the fake executor. Half of them follow the schemas, half break them somewhere, and
most get the name of the model and a few tokens to make, so that they come as far as the engine.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from tests.e2e.conftest import TEMPLATE
from tests.e2e.live import LiveServer

from quire.models.hub import quill_path

schemathesis = pytest.importorskip("schemathesis", reason="not installed: `make dev` does it")

NUM_REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "20000"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
HANG_S = 20.0
JSON = {"content-type": "application/json"}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # kept short, so that answers end


class Fuzzer:
    """Sends cases and keeps count."""

    def __init__(self, url: str) -> None:
        self.statuses: Counter[int] = Counter()
        self.by_path: Counter[str] = Counter()
        self.faults: list[str] = []
        self._client = httpx.Client(base_url=url, timeout=HANG_S)

    def close(self) -> None:
        self._client.close()

    def send(self, label: str, method: str, path: str, body: Any) -> None:
        said = f"{method} {path} {body!r:.2000}"
        begin_s = time.monotonic()
        try:
            answer = self._client.request(method, path, content=payload(body), headers=JSON)
        except httpx.TimeoutException:
            self.faults.append(f"hang: {said}")
            return
        except httpx.TransportError as error:
            self.faults.append(f"{type(error).__name__}: {said}")
            return
        self.statuses[answer.status_code] += 1
        self.by_path[label] += 1
        if answer.status_code >= 500:
            self.faults.append(f"{answer.status_code}: {said}: {answer.text:.500}")
        if time.monotonic() - begin_s > HANG_S:
            self.faults.append(f"slow: {said}")

    @property
    def total(self) -> int:
        return self.statuses.total()


def payload(body: Any) -> bytes | None:
    """JSON where it can be, NaN and lone surrogates included; else the junk as it is."""
    if body is None or isinstance(body, bytes):
        return body
    try:
        return json.dumps(body).encode()
    except TypeError:
        return repr(body).encode(errors="replace")


def tamed(body: Any, keep: set[int], wild: bool) -> Any:
    """Most bodies get the model's name, a short answer, and some of their fields only."""
    if wild or not isinstance(body, dict):
        return body
    kept = {
        name: value
        for i, (name, value) in enumerate(body.items())
        if name in ("messages", "prompt", "input", "tokens", "query", "documents") or i in keep
    }
    for name in LENGTHS:
        if isinstance(kept.get(name), int):
            kept[name] = kept[name] % 9
    if "messages" in kept or "prompt" in kept:
        kept.setdefault("max_tokens", 4)
    if "input" in kept:
        kept.setdefault("max_output_tokens", 16)
    return {**kept, "model": "tiny"}


def path_of(case: Any) -> str:
    path = str(case.path)
    for name, value in (case.path_parameters or {}).items():
        path = path.replace("{" + name + "}", str(value))  # encoded already
    return path


def fuzz(fuzzer: Fuzzer, operation: Any, mode: Any, count: int) -> None:
    """Send ``count`` cases of an operation."""

    @seed(SEED)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=operation.as_strategy(generation_mode=mode),
        keep=st.sets(st.integers(0, 60), max_size=6),
        wild=st.integers(0, 9).map(lambda draw: draw == 0),
    )
    def run(case: Any, keep: set[int], wild: bool) -> None:
        body = case.body if operation.method.upper() == "POST" and case.media_type else None
        fuzzer.send(operation.label, operation.method.upper(), path_of(case), tamed(body, keep, wild))

    run()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_comes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    model = str(quill_path("quill"))
    modes = schemathesis.GenerationMode
    with LiveServer(
        ["-m", "tests.e2e.serve_fake_engine", model, str(template), "0", str(tmp_path / "batches")],
        tmp_path / "log",
    ) as live:
        description = schemathesis.openapi.from_url(live.url + "/openapi.json")
        operations = [found.ok() for found in description.get_all_operations()]
        posts = [one for one in operations if one.body]
        others = [one for one in operations if not one.body]
        fuzzer = Fuzzer(live.url)
        request.addfinalizer(fuzzer.close)
        for operation in others:
            fuzz(fuzzer, operation, modes.POSITIVE, 50)
        for operation in posts:
            left = max(10, (NUM_REQUESTS - fuzzer.total) // (len(posts) - posts.index(operation)))
            for mode in (modes.POSITIVE, modes.NEGATIVE):
                fuzz(fuzzer, operation, mode, left // 2)
        while fuzzer.total < NUM_REQUESTS:  # what could not be sent, again with other seeds
            fuzz(fuzzer, posts[fuzzer.total % len(posts)], modes.POSITIVE, 200)
        deadline = time.monotonic() + 30
        while live.metric("vllm:num_requests_running") and time.monotonic() < deadline:
            time.sleep(0.1)
        left_over = {
            name: live.metric(f"vllm:{name}")
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        }
        assert live.stop() == 0, live.log.read_text()
    print(f"\n{fuzzer.total} requests, seed {SEED}: {dict(sorted(fuzzer.statuses.items()))}")
    print(
        f"5xx, hangs and the like: {len(fuzzer.faults)}; left over: {left_over}; by path: {dict(fuzzer.by_path)}"
    )
    assert not fuzzer.faults, "\n".join(fuzzer.faults[:10])
    assert not any(left_over.values()), left_over
    assert fuzzer.statuses[200] > fuzzer.total // 20, "nearly nothing got through"
    assert fuzzer.statuses[400] > fuzzer.total // 20
