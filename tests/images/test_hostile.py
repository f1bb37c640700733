"""Hostile images by the thousand: each refused by the name of its field, others served, and nothing kept."""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("PIL", reason="the extra `images` is not installed")

from tests.e2e.live import LiveServer
from tests.images.hostile import HARMLESS, HOSTILE, LARGE, file_of
from tests.images.tiny_vlm import make_image, make_model

pytestmark = pytest.mark.slow

PLACE = "messages[0].content[0].image_url.url"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("vlm")
    make_model(folder)
    command = ["-m", "quire.cli", "serve", str(folder), "--port", "0", "--served-model-name", "tiny",
               "--num-kv-blocks", "160", "--threads", "1", "--dtype", "float32"]  # fmt: skip
    with LiveServer(command, folder / "log") as live:
        yield live
        assert live.stop() == 0, live.log.read_text()


def ask(client: httpx.Client, data: bytes) -> httpx.Response:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    body = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
            "max_tokens": 1, "temperature": 0}  # fmt: skip
    while True:
        answer = client.post("/v1/chat/completions", json=body, timeout=120)
        if answer.status_code != 503:  # too many wait for the helpers
            return answer
        time.sleep(0.1)


def check(client: httpx.Client, name: str, data: bytes) -> None:
    answer = ask(client, data)
    if name in HOSTILE:
        assert answer.status_code == 400, (name, answer.text)
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (PLACE, "invalid_image"), name
        assert HOSTILE[name][1] in error["message"], name
    else:
        assert answer.status_code == 200, (name, answer.text)


def shuffled(count: int) -> list[tuple[str, bytes]]:
    """Return ``count`` files of every kind; those that can be made new are others each time."""
    known = [(name, data) for name, (data, _) in HOSTILE.items()] + list(HARMLESS.items())
    chance = random.Random(7)
    files = [chance.choice(known) for _ in range(count - count // 10)]
    files += [("new", file_of(make_image(20 + i % 60, 20 + i % 37, i))) for i in range(count // 10)]
    chance.shuffle(files)
    return files


def send_all(server: LiveServer, files: Sequence[tuple[str, bytes]], num_threads: int = 4) -> None:
    with httpx.Client(base_url=server.url) as client, ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(lambda file: check(client, *file), files))


def test_thousand_hostile_images_leave_probes_fast(server: LiveServer) -> None:
    """Ninety-nine probes of a hundred come back within 100 ms; the largest is printed for the results."""
    latencies: list[float] = []
    done = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=server.url) as client:
            while not done.wait(0.02):
                begun = time.monotonic()
                assert client.get("/healthz", timeout=60).status_code == 200
                latencies.append(time.monotonic() - begun)

    prober = threading.Thread(target=probe)
    prober.start()
    files = shuffled(1000)
    for at in range(0, len(files), 100):
        files.insert(at, ("large", LARGE))
    try:
        send_all(server, files)
    finally:
        done.set()
        prober.join()
    ordered = sorted(latencies)
    print(f"probes: {len(ordered)}, median {ordered[len(ordered) // 2] * 1e3:.1f} ms, "
          f"p99 {ordered[len(ordered) * 99 // 100] * 1e3:.1f} ms, largest {ordered[-1] * 1e3:.1f} ms")  # fmt: skip
    assert ordered[len(ordered) * 99 // 100] < 0.1


def resident_bytes(pid: int) -> int:
    """Return the memory of a process and of all that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return own + sum(resident_bytes(int(child)) for child in children)


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_nothing_leaks_in_ten_thousand(server: LiveServer) -> None:
    """The files that are kept are bounded, and all of them are kept by then."""
    files = shuffled(10_000)
    send_all(server, files[:3000])
    pid = server.process.pid
    before, open_before = resident_bytes(pid), num_files(pid)
    send_all(server, files[3000:])
    after, open_after = resident_bytes(pid), num_files(pid)
    print(f"memory: {before >> 20} MiB after 3,000 files, {after >> 20} MiB after 10,000; "
          f"open files: {open_before}, {open_after}")  # fmt: skip
    assert after - before < 64 << 20
    assert open_after <= open_before + 8
