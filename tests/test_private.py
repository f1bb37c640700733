"""What holds prompts, answers or who asked: files of mode 600 in folders of mode 700, made or found."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.api.asgi_client import Api
from tests.gateway.live import Scripted, gateway, says

from quire.engine import guard, recording_file
from quire.private import private_folder, tighten


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(root: Path) -> list[str]:
    """What in ``root``, and of it, others may read."""
    return [f"{path} {mode(path):o}" for path in [root, *root.rglob("*")] if mode(path) & 0o077]


def loosened(root: Path) -> None:
    """As an older version left it."""
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def work(api: Api) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    upload = api.call(
        "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", json.dumps(line).encode())}
    )
    batch = {
        "input_file_id": upload.json()["id"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    assert api.post("/v1/batches", batch).status_code == 200
    assert api.post("/v1/responses", {"model": "tiny", "input": "hi", "background": True}).status_code == 200
    assert api.post("/v1/chat/completions", {**chat, "stream": True}).status_code == 200


def test_a_servers_files_are_its_users_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "batch_dir": str(tmp_path / "deep" / "jobs"),
        "journal_dir": tmp_path / "journal",
        "response_dir": tmp_path / "deep" / "jobs" / "responses",
    }
    work(Api(**settings))
    folders = [tmp_path / "deep" / "jobs", tmp_path / "journal"]
    for folder in folders:
        assert len([*folder.rglob("*")]) > 0
        assert open_to_others(folder) == []
        loosened(folder)
    api = Api(**settings)
    assert [path for folder in folders for path in open_to_others(folder)] == []
    work(api)
    assert [path for folder in folders for path in open_to_others(folder)] == []


def test_a_gateways_books_are_its_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "books"

    async def go() -> None:
        files = {"ledger": str(folder / "ledger.db"), "access_log_file": str(tmp_path / "access.log")}
        async with gateway(Scripted(says("hi")), **files) as live:
            assert (await live.post({"model": "m", "prompt": "x"}))[0] == 200
            assert open_to_others(folder) == []
            assert {path.name for path in folder.iterdir()} >= {"ledger.db", "ledger.db-wal"}

    asyncio.run(go())
    assert mode(tmp_path / "access.log") == 0o600
    loosened(folder)
    (tmp_path / "access.log").chmod(0o640)
    asyncio.run(go())
    assert open_to_others(folder) == []
    assert mode(tmp_path / "access.log") == 0o640, "a collector of logs may need it: it is only named"


def test_recordings_and_hang_dumps_are_few_and_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    said = Path(guard.keep_dump("stacks"))
    assert said.read_text() == "stacks"
    old = said.with_name("quire-20260101T000000.000000Z-1-hang.txt")
    old.write_text("of an older version")
    for _ in range(2 * recording_file.MAX_FILES):
        guard.keep_dump("stacks")
    assert len([*said.parent.glob("*-hang.txt")]) == recording_file.MAX_FILES
    assert not old.exists()
    now = datetime(2026, 11, 27, tzinfo=UTC)
    for number in range(3):
        recording_file.keep(said.parent, "1-hang.rec", b"x", now + timedelta(seconds=number))
    assert open_to_others(said.parent) == []
    assert guard.keep_dump("").startswith("none")


def test_folders_that_a_setting_names_are_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "other").write_text("x")
    with caplog.at_level("WARNING"):
        private_folder(tmp_path, is_ours=False, files="*.journal")
    assert mode(tmp_path) == 0o755
    assert mode(tmp_path / "other") == 0o644
    assert "others_may_read" in caplog.text
    tighten(tmp_path / "missing")
