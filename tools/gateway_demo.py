"""Two Quill replicas behind a gateway, two keys with different limits, and a replica that is killed: make gateway-demo.

Every step prints what it does and what came back, as the curl lines of docs/gateway.md would; a step that does not come
out as it should ends the script with status 1.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

QUIRE = [sys.executable, "-m", "quire.cli"]
WAIT_S = 120
NAMES = ("gateway", "replica-0", "replica-1")  # of the processes, in the order in which they start
CONFIG = """
port = 0
admin_key = "demo-admin"
key_file = "{folder}/keys"
[limits.keys.patient]
requests_per_minute = 1000
[limits.keys.hurried]
requests_per_minute = 3
"""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="quire-demo-") as name:
        folder, children = Path(name), list[subprocess.Popen[bytes]]()
        try:
            return demo(folder, children)
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait(30)


def demo(folder: Path, children: list[subprocess.Popen[bytes]]) -> int:
    keys = {each: new_key(folder, each) for each in ("patient", "hurried")}
    (folder / "gateway.toml").write_text(CONFIG.format(folder=folder))
    children.append(start(folder, NAMES[0], ["gateway", "--config", str(folder / "gateway.toml")]))
    url = awaited(folder, children, r"listening url=(\S+)", 1)[0]
    for name in NAMES[1:]:
        children.append(
            start(folder, name, ["serve", "quill", "--port", "0", "--threads", "1", "--api-key", "inner",
                                               "--gateway", url, "--gateway-key", "demo-admin"])
        )  # fmt: skip
    awaited(folder, children, r"backend_ready backend=(\S+)", 2)
    said(
        f"two replicas registered at {url}",
        "models",
        call(url, "/v1/models", None, keys["patient"])[1]["data"],
    )

    body = {"model": "quill", "prompt": "It was a dark and", "max_tokens": 12, "seed": 7}
    status, answer = call(url, "/v1/completions", body, keys["patient"])
    said(f"curl {url}/v1/completions -d '{json.dumps(body)}'", str(status), answer["choices"][0]["text"])
    statuses = [call(url, "/v1/completions", body | {"max_tokens": 1}, keys["hurried"])[0] for _ in range(5)]
    said("five requests of a key with three per minute", "statuses", statuses)
    if sorted(statuses) != [200, 200, 200, 429, 429]:
        return failed("the limit of the key did not hold")

    os.kill(children[1].pid, signal.SIGKILL)
    begin = time.monotonic()
    texts = [call(url, "/v1/completions", body, keys["patient"]) for _ in range(20)]
    seconds = time.monotonic() - begin
    same = sum(
        status == 200 and each["choices"][0]["text"] == answer["choices"][0]["text"] for status, each in texts
    )
    said("kill -9 of a replica, then the same request 20 times", f"{same} of 20 equal", f"in {seconds:.1f} s")
    request = urllib.request.Request(url + "/admin/backends", headers={"authorization": "Bearer demo-admin"})
    with urllib.request.urlopen(request, timeout=30) as response:
        states = {each["name"]: each["state"] for each in json.load(response)["data"]}
    said("curl /admin/backends", "states", states)
    return 0 if same == 20 else failed("an answer differed or was lost")


def new_key(folder: Path, name: str) -> str:
    command = [*QUIRE, "keys", "create", name, "--tenant", "demo", "--file", str(folder / "keys")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"sk-quire-\S+", printed)
    assert found is not None, printed
    return found[0]


def start(folder: Path, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    out: IO[bytes] = (folder / f"{name}.log").open("wb")
    with out:
        return subprocess.Popen([*QUIRE, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def awaited(folder: Path, children: list[subprocess.Popen[bytes]], pattern: str, num: int) -> list[str]:
    """Return the first ``num`` matches of ``pattern`` in the gateway's log, once they are there.

    Raises:
        SystemExit: one of ``children`` has ended, or the matches did not come in time; with the log that says why.
    """
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        text = (folder / f"{NAMES[0]}.log").read_text(errors="replace")
        if len(found := re.findall(pattern, text)) >= num:
            return [str(each) for each in found]
        for name, child in zip(NAMES, children, strict=False):
            if child.poll() is not None:
                log = (folder / f"{name}.log").read_text(errors="replace")
                raise SystemExit(f"{name} has ended with status {child.returncode}:\n{log}")
        time.sleep(0.1)
    raise SystemExit(f"{pattern!r} did not come within {WAIT_S} s in the gateway's log:\n{text}")


def call(url: str, path: str, body: dict[str, Any] | None, key: str) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url + path, data, headers), timeout=60
        ) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def said(step: str, name: str, value: object) -> None:
    print(f"{step}\n    {name}: {value}", flush=True)


def failed(why: str) -> int:
    print(f"FAILED: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
