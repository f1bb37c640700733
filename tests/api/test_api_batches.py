"""Files and batches: forms, limits, pages, states, and a server that dies in the middle of one."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.test_api_server import server

import quire.jobs.files
from quire.errors import RequestError
from quire.http.edge import new_id
from quire.http.refusals import HttpError
from quire.jobs.files import FileStore
from quire.jobs.form import read_form
from quire.jobs.lines import check_lines, done_ids, output_line, unanswered_line

CHAT = "/v1/chat/completions"


def connected(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"messages": [{"role": "user", "content": "hi"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


def jsonl(*lines: Any) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in lines).encode()


def wait(client: openai.OpenAI, batch_id: str, timeout_s: float = 20.0) -> openai.types.Batch:
    deadline = time.monotonic() + timeout_s
    while (batch := client.batches.retrieve(batch_id)).status not in (
        "completed",
        "failed",
        "expired",
        "cancelled",
    ):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def rows(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    assert file_id is not None
    return {row["custom_id"]: row for row in map(json.loads, client.files.content(file_id).text.splitlines())}


def begin(
    client: openai.OpenAI, *lines: Any, endpoint: Any = CHAT, window: Any = "24h", **more: Any
) -> openai.types.Batch:
    made = client.files.create(file=("lines.jsonl", jsonl(*lines)), purpose="batch")
    return client.batches.create(input_file_id=made.id, endpoint=endpoint, completion_window=window, **more)


NO_NAME = b"--b\r\nContent-Disposition: form-data\r\n\r\nv\r\n--b--"
BROKEN = [b"", b"--b\r\n\r\n--b--", b"--b\r\nX: 1\r\n\r\nv\r\n--b--", NO_NAME, NO_NAME[:-2]]


def read(content_type: str, body: bytes, size: int = 7) -> dict[str, Any]:
    """The parts of a form that arrives in pieces of ``size`` bytes: texts, and (file name, bytes)."""
    pieces = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages[-1]["more_body"] = False

    async def receive() -> Any:
        return messages.pop(0)

    async def go() -> dict[str, Any]:
        scope = {"headers": [(b"content-type", content_type.encode())]}
        async with read_form(scope, receive, 10_000) as form:
            return {
                name: item if isinstance(item, str) else (item.filename, await item.read())
                for name, item in form.items()
            }

    return asyncio.run(go())


@pytest.mark.parametrize("body", BROKEN)
def test_broken_forms(body: bytes) -> None:
    with pytest.raises(RequestError, match="multipart"):
        read("multipart/form-data; boundary=b", body)
    with pytest.raises(RequestError, match="boundary"):
        read("application/json", body)


def test_a_form_keeps_every_byte() -> None:
    data = bytes(range(256)) + b"\r\n--bound\r\n-- \r\n"
    request = httpx.Request(
        "POST", "http://x", files={"file": ('a b".jsonl', data)}, data={"purpose": "batch"}
    )
    parts = read(request.headers["content-type"], request.read())
    assert set(parts) == {"file", "purpose"}
    assert parts["file"][1] == data
    assert parts["purpose"] == "batch"


@pytest.mark.parametrize(
    ("text", "code", "number"),
    [
        ("", "empty_file", None),
        ("{", "invalid_json_line", 1),
        ("[]", "invalid_json_line", 1),
        (json.dumps({**line("a"), "custom_id": 5}), "missing_required_parameter", 1),
        (json.dumps(line("a")) + "\n\n" + json.dumps(line("a")), "duplicate_custom_id", 3),
        (json.dumps(line("a", "/v1/completions")), "mismatched_endpoint", 1),
        (json.dumps({**line("a"), "method": "GET"}), "invalid_method", 1),
        (json.dumps({**line("a"), "body": "x"}), "missing_required_parameter", 1),
        (json.dumps({**line("a"), "bdy": 1}), "unknown_parameter", 1),
        (json.dumps(line("a", stream=True)), "invalid_request", 1),
        (json.dumps(line("a", priority=3)), "invalid_request", 1),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, code: str, number: int | None) -> None:
    path = tmp_path / "lines"
    path.write_text(text)
    _, (error,) = check_lines(path, CHAT)
    assert (error.code, error.line) == (code, number)


def test_a_line_that_a_crash_cut_off_is_cut_away(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert done_ids(path) == set()
    whole = output_line("r", "a", 200, b"{}") + unanswered_line("r", "b", "batch_expired", "x")
    path.write_bytes(whole + b'{"id": "batch_req_1", "custom')
    assert done_ids(path) == {"a", "b"}
    assert path.read_bytes() == whole


def test_adopting_again_after_a_crash_does_no_more(tmp_path: Path) -> None:
    store = FileStore(tmp_path, lambda: "0" * 32, lambda: 100.0)
    source = tmp_path / "out"
    source.write_bytes(b"x")
    made = store.adopt(source, "b_output.jsonl", "batch_output", "", 5)
    assert made is not None
    assert (made["bytes"], made["expires_at"]) == (1, 105)
    assert store.adopt(source, "b_output.jsonl", "batch_output", "", 5) == made
    (tmp_path / "files" / f"{made['id']}.json").unlink()  # died between the move and the description
    assert store.adopt(source, "b_output.jsonl", "batch_output", "", 5) == made
    assert store.adopt(source, "other.jsonl", "batch_output", "") is None
    later = FileStore(tmp_path, lambda: "0" * 32, lambda: 105.0)
    assert later.all("") == []
    for odd in ("file-../../x", "", "file-" + "g" * 32):
        assert store.get(odd, "") is None
        assert not store.delete(odd, "")


def test_without_a_folder_there_are_none() -> None:
    api = Api()
    for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches"), ("GET", "/v1/files/x/content")):
        error = error_of(api.call(method, path), 404)
        assert error["code"] == "batches_disabled"
        assert "--batch-dir" in error["message"]


def test_refusals(tmp_path: Path) -> None:
    api = Api(batch_dir=str(tmp_path), max_file_bytes=100)

    def upload(data: bytes = b"{}", **fields: Any) -> httpx.Response:
        return api.call("POST", "/v1/files", files={"file": ("x", data)}, data={"purpose": "batch", **fields})

    error_of(upload(b"x" * 70_000), 413)
    assert error_of(upload(purpose="fine-tune"), 400)["param"] == "purpose"
    assert error_of(upload(colour="red"), 400)["param"] == "colour"
    expires = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}
    assert error_of(upload(**expires), 400)["param"] == "expires_after.seconds"
    assert (
        error_of(api.call("POST", "/v1/files", data={"purpose": "batch"}), 400)["code"] == "invalid_multipart"
    )
    file = upload(**{**expires, "expires_after[seconds]": "3600"}).json()
    assert file["expires_at"] == file["created_at"] + 3600
    good = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    for change in (
        {"input_file_id": "file-nothing"}, {"input_file_id": 5}, {"endpoint": "/v1/messages"},
        {"completion_window": "1y"},
        {"completion_window": "31d"}, {"metadata": {"a": 1}}, {"endpoints": "x"},
    ):  # fmt: skip
        assert error_of(api.post("/v1/batches", {**good, **change}), 400)["param"] == next(iter(change))
    for seconds, allowed in ((5804.5, "an integer"), (60, "an integer in 3600…2592000")):
        kept = {"anchor": "created_at", "seconds": seconds}
        error = error_of(api.post("/v1/batches", {**good, "output_expires_after": kept}), 400)
        assert error["message"] == (
            f"output_expires_after.seconds = {seconds} is not allowed: it must be {allowed}."
        )
    kept = {"anchor": "created_at", "seconds": 5804.0}  # of a client whose language has one type of number
    assert api.post("/v1/batches", {**good, "output_expires_after": kept}).status_code == 200
    for query, param in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
    ):
        assert error_of(api.call("GET", f"/v1/batches?{query}"), 400)["param"] == param
    error_of(api.call("GET", "/v1/batches/batch_x"), 404)
    error_of(api.call("POST", "/v1/batches/batch_x/cancel"), 404)
    error_of(api.call("DELETE", "/v1/files/file-x"), 404)


def test_openais_client(tmp_path: Path) -> None:
    with (
        server("0", "1", "", str(tmp_path)) as (_, url),
        connected(url) as client,
    ):
        lines = [
            line("good", seed=4),
            line("bad", temperature=-1),
            line("two", n=2),
            line("unknown", model="nobody"),
        ]
        batch = wait(client, begin(client, *lines, metadata={"night": "1"}).id)
        assert (batch.status, batch.metadata) == ("completed", {"night": "1"})
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
        out, errors = rows(client, batch.output_file_id), rows(client, batch.error_file_id)
        assert set(out) == {"good", "two"}
        alone = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], seed=4
        )
        assert (
            out["good"]["response"]["body"]["choices"][0]["message"]["content"]
            == alone.choices[0].message.content
        )
        assert len(out["two"]["response"]["body"]["choices"]) == 2
        assert {name: row["response"]["status_code"] for name, row in errors.items()} == {
            "bad": 400,
            "unknown": 404,
        }
        assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"

        failed = wait(client, begin(client, line("a"), line("a")).id)
        assert failed.status == "failed"
        assert failed.errors is not None
        assert failed.errors.data is not None
        assert failed.errors.data[0].code == "duplicate_custom_id"

        made = [failed.id, batch.id]
        assert [b.id for b in client.batches.list()] == made
        assert [b.id for b in client.batches.list(limit=1)] == made, "the client turns the pages"
        assert {f.purpose for f in client.files.list()} == {"batch", "batch_output"}
        (first, *_) = client.files.list(purpose="batch", order="asc")
        assert client.files.retrieve(first.id).filename == "lines.jsonl"
        assert client.files.delete(first.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="is completed"):
            client.batches.cancel(batch.id)


def test_cancel_and_expiry_tell_of_every_line(tmp_path: Path) -> None:
    with (
        server("40", "1", "", str(tmp_path)) as (_, url),
        connected(url) as client,
    ):
        lines = [line(str(i), max_tokens=2 if i == 0 else None) for i in range(30)]
        batch = begin(client, *lines)
        while not (client.batches.retrieve(batch.id).request_counts or batch.request_counts).completed:  # type: ignore[union-attr]
            time.sleep(0.01)
        with pytest.raises(openai.BadRequestError, match="input of a batch"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        late = begin(client, *lines, window="3s")  # a slow machine answers its first line in that
        for one, code in (
            (wait(client, batch.id), "batch_cancelled"),
            (wait(client, late.id), "batch_expired"),
        ):
            assert one.status == code.removeprefix("batch_")
            out, errors = rows(client, one.output_file_id), rows(client, one.error_file_id)
            assert set(out) | set(errors) == {str(i) for i in range(30)}
            assert not set(out) & set(errors)
            assert "0" in out
            assert {row["error"]["code"] for row in errors.values()} == {code}


def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    lines = [line(str(i), seed=i) for i in range(24)]
    with (
        server("10", "1", "", str(tmp_path)) as (process, url),
        connected(url) as client,
    ):
        batch = begin(client, *lines)
        while (client.batches.retrieve(batch.id).request_counts or batch.request_counts).completed < 3:  # type: ignore[union-attr]
            time.sleep(0.01)
        process.kill()
        process.wait(60)
    written = (tmp_path / "batches" / f"{batch.id}.output.jsonl").read_bytes()
    before = written[: written.rfind(b"\n") + 1]
    assert 3 <= before.count(b"\n") < 24
    with (
        server("0", "1", "", str(tmp_path)) as (_, url),
        connected(url) as client,
    ):
        ended = wait(client, batch.id)
        assert ended.status == "completed"
        assert ended.request_counts is not None
        assert ended.request_counts.model_dump() == {"total": 24, "completed": 24, "failed": 0}
        assert ended.output_file_id is not None
        content = client.files.content(ended.output_file_id).content
    assert content.startswith(before), "what was answered stays as it was"
    assert sorted(json.loads(row)["custom_id"] for row in content.splitlines()) == sorted(
        str(i) for i in range(24)
    )


def test_the_store_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads beyond its bytes or its number are 507; what a batch writes always has room."""
    store = FileStore(tmp_path, new_id, lambda: 100.0, max_bytes=1000)
    first = store.add(io.BytesIO(b"x" * 600), "a", "batch", "")
    with pytest.raises(HttpError) as full:
        store.add(io.BytesIO(b"x" * 500), "b", "batch", "")
    assert (full.value.refusal.status, full.value.refusal.code) == (507, "file_store_full")
    assert "--file-store-mib" in full.value.refusal.message
    written = tmp_path / "answers"
    written.write_bytes(b"x" * 5000)
    assert store.adopt(written, "answers", "batch_output", "") is not None
    store.delete(first["id"], "")
    assert len(store.all("")) == 1
    roomy = FileStore(tmp_path, new_id, lambda: 100.0)
    monkeypatch.setattr(quire.jobs.files, "MAX_FILES", 2)
    roomy.add(io.BytesIO(b"x"), "c", "batch", "")
    with pytest.raises(HttpError):
        roomy.add(io.BytesIO(b"x"), "d", "batch", "")
