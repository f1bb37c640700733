"""Filters: what passes unchanged, what is changed by sentence, what is refused, and what a failing filter does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.live import (
    Received,
    Script,
    Scripted,
    answer,
    begin_stream,
    chunk,
    frame,
    gateway,
)
from tests.gateway.test_migrate import Quill, group

from quire.errors import ConfigError
from quire.http.refusals import HttpError
from quire_gateway.config_file import gateway_config
from quire_gateway.filter_config import FilterArgs, FilterConfig
from quire_gateway.filter_kinds import make_filters
from quire_gateway.filtering import Filtering
from quire_gateway.filters import About, Filters, Refused
from quire_gateway.ledger_database import open_database
from quire_gateway.ledger_report import report

SECRET = {
    "name": "secrets",
    "keywords": ["secret", "top hat"],
    "patterns": [r"\d{3}-\d{2}"],
    "action": "redact",
}
ABOUT = About("r", "/v1/completions", "m", "", "")


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def chain(**args: Any) -> Filters:
    given = {"name": "f", "keywords": ("secret",)} | args
    found = make_filters([FilterConfig(FilterArgs(**given))], lambda: None)  # type: ignore[arg-type,return-value]
    assert found is not None
    return found


def chat_frame(text: str, index: int = 0, finish: str | None = None) -> bytes:
    delta = {"content": text} if text else {}
    return frame({"id": "c", "choices": [{"index": index, "delta": delta, "finish_reason": finish}]})


def texts(stream: bytes) -> dict[int, str]:
    found: dict[int, str] = {}
    for each in stream.split(b"\n\n"):
        value = json.loads(each[6:]) if each.startswith(b"data: {") else {}
        for choice in value.get("choices", ()):
            said = choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + said
    return found


async def filtered(filters: Filters, frames: list[bytes]) -> list[bytes]:
    """Return what comes out behind each of ``frames``, and at the end."""
    filtering = Filtering(filters, ABOUT)
    out = []
    for each in frames:
        out.append(await filtering.events(each))
        filtering.check()
    return [*out, await filtering.ended(b"")]


def test_what_passes_keeps_its_bytes() -> None:
    async def main() -> None:
        words = ["It ", "was", " dark. ", "And then", " it\n", "rained", "."]
        frames = [b": hello\n\n", *map(chat_frame, words), chat_frame("", 0, "stop"), b"data: [DONE]\n\n"]
        out = await filtered(chain(), frames)
        assert b"".join(out) == b"".join(frames)
        assert out[:4] == [frames[0], b"", b"", b"".join(frames[1:4])]

    run(main())


def test_a_word_in_pieces_is_redacted() -> None:
    async def main() -> None:
        words = ["My sec", "ret is", " safe", ". Bye", "."]
        frames = [*map(chat_frame, words), chat_frame("", 0, "stop")]
        out = b"".join(await filtered(chain(action="redact", replacement="***"), frames))
        assert texts(out) == {0: "My *** is safe. Bye."}
        assert out.count(b"data:") == len(frames)

    run(main())


def test_choices_do_not_wait_for_one_another() -> None:
    async def main() -> None:
        frames = [chat_frame("No end", 0), chat_frame("An end. ", 1), chat_frame("More", 1)]
        end = [chat_frame(" here secret", 0, "stop"), chat_frame("", 1, "stop")]
        out = await filtered(chain(action="redact"), frames + end)
        assert out[1] == frames[1]
        assert out[0] == out[2] == b""
        assert texts(b"".join(out)) == {0: "No end here [removed]", 1: "An end. More"}

    run(main())


def test_hold_back_is_bounded_and_cuts_no_word() -> None:
    async def main() -> None:
        frames = [chat_frame(f"word{i} ") for i in range(40)] + [chat_frame("sec"), chat_frame("ret x")]
        out = await filtered(chain(action="redact", hold_chars=30), [*frames, chat_frame("", 0, "stop")])
        assert max(len(b"".join(out[:i])) for i in range(10)) > 0
        text = texts(b"".join(out))[0]
        assert text.endswith("[removed] x")
        held = 0
        for frame_in, frame_out in zip(frames, out, strict=False):
            held += len(texts(frame_in)[0]) - len(texts(frame_out).get(0, ""))
            assert held <= 30 + len("word00 ")

    run(main())


def test_a_word_cut_by_the_bound_is_refused() -> None:
    async def main() -> None:
        filters = chain(patterns=("a{50}",), keywords=())
        filters.hold_chars = 20
        with pytest.raises(HttpError, match="not allowed"):
            await filtered(filters, [chat_frame("a" * 10) for _ in range(6)])

    run(main())


def sse(kind: str, **values: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **values}).encode())


def test_responses_repeat_the_filtered_text() -> None:
    async def main() -> None:
        place = {"output_index": 0, "content_index": 0}
        whole = "A secret. The end"
        part = {"type": "output_text", "text": whole}
        item = {"type": "message", "content": [part]}
        frames = [
            sse("response.created", response={"output": []}),
            sse("response.output_text.delta", delta="A sec", logprobs=[], **place),
            sse("response.output_text.delta", delta="ret. The", logprobs=[{"token": "x"}], **place),
            sse("response.output_text.delta", delta=" end", **place),
            sse("response.output_text.done", text=whole, **place),
            sse("response.content_part.done", part=part, **place),
            sse("response.output_item.done", item=item, output_index=0),
            sse("response.completed", response={"output": [item]}),
        ]
        out = await filtered(chain(action="redact", replacement="-"), frames)
        assert out[0] == frames[0]
        assert b"secret" not in b"".join(out)
        values = [json.loads(each.split(b"data: ")[1]) for each in b"".join(out).split(b"\n\n") if each]
        assert "".join(v.get("delta", "") for v in values) == "A -. The end"
        assert values[4]["text"] == values[5]["part"]["text"] == "A -. The end"
        assert values[6]["item"] == values[7]["response"]["output"][0]
        assert values[7]["response"]["output"][0]["content"][0]["text"] == "A -. The end"
        assert all(not v.get("logprobs") for v in values)
        assert [v["type"] for v in values] == [json.loads(f.split(b"data: ")[1])["type"] for f in frames]

    run(main())


def test_messages_and_tool_arguments_are_filtered() -> None:
    async def main() -> None:
        frames = [
            sse("message_start", message={"type": "message", "content": []}),
            sse("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            sse("content_block_delta", index=0, delta={"type": "text_delta", "text": "the se"}),
            sse("ping"),
            sse("content_block_delta", index=0, delta={"type": "text_delta", "text": "cret"}),
            sse("content_block_stop", index=0),
            sse(
                "content_block_delta",
                index=1,
                delta={"type": "input_json_delta", "partial_json": '{"a": "sec'},
            ),
            sse("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": 'ret"}'}),
            sse("content_block_stop", index=1),
            sse("message_stop"),
        ]
        out = await filtered(chain(action="redact", replacement="-"), frames)
        assert [len(each) > 0 for each in out[:6]] == [True, True, False, False, False, True]
        joined = b"".join(out)
        assert b'"text":"the -"' in joined
        assert b'{\\"a\\": \\"-\\"}' in joined
        value = {"type": "message", "content": [{"type": "tool_use", "input": {"a": "a secret"}}]}
        body = await Filtering(chain(action="redact", replacement="-"), ABOUT).filtered_body(
            json.dumps(value).encode()
        )
        assert json.loads(body)["content"][0]["input"] == {"a": "a -"}

    run(main())


def streams(*words: str) -> Script:
    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        usage = {"prompt_tokens": 5, "completion_tokens": len(words)}
        if not request.body.get("stream"):
            message = {"role": "assistant", "content": "".join(words)}
            choice = {"index": 0, "message": message, "logprobs": {"content": [{"token": words[0]}]}}
            await answer(writer, 200, json.dumps({"id": "c", "choices": [choice], "usage": usage}).encode())
            return
        await begin_stream(writer)
        for word in words:
            await chunk(writer, chat_frame(word))
        await chunk(writer, chat_frame("", 0, "stop") + frame({"choices": [], "usage": usage}))
        await chunk(writer, b"data: [DONE]\n\n")
        await chunk(writer, b"")

    return script


CHAT = "/v1/chat/completions"


def ask(text: str, *, stream: bool = False) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}


def test_requests_are_changed_or_refused_before_the_model(tmp_path: Path) -> None:
    async def main() -> None:
        backend = Scripted(streams("fine."))
        refuses = {"keywords": ["bomb"], "when": "before", "name": "words"}
        books = {"ledger": str(tmp_path / "ledger.sqlite")}
        async with gateway(backend, filters=[SECRET, refuses], **books) as live:
            status, _ = await live.post(ask("A Secret and 123-45."), CHAT)
            assert status == 200
            assert backend.received[0].body["messages"][0]["content"] == "A [removed] and [removed]."
            status, body = await live.post(ask("a bomb"), CHAT)
            error = json.loads(body)["error"]
            assert (status, error["code"]) == (400, "content_filter")
            assert "'words'" in error["message"]
            status, body = await live.post({"model": "m", "prompt": [[1, 2]]})
            assert (status, json.loads(body)["error"]["code"]) == (400, "content_filter")
            assert len(backend.received) == 1
            assert live.state.filters is not None
            assert live.state.filters.counts["words", "before", "refused"] == 1

    run(main())
    database = open_database(str(tmp_path / "ledger.sqlite"))
    found = {line["outcome"]: line["requests"] for line in report(database, ["outcome"])}
    database.close()
    assert found == {"ok": 1, "filtered": 2}


def test_answers_are_changed_or_refused() -> None:
    async def main() -> None:
        backend = Scripted(streams("A sec", "ret. ", "A bo", "mb. ", "Bye."))
        async with gateway(backend, filters=[SECRET]) as live:
            for stream in (False, True):
                status, body = await live.post(ask("hi", stream=stream), CHAT)
                assert status == 200
                assert b"[removed]" in body
                assert b"sec" not in body  # neither in the log-probabilities of a whole answer
        refuses = {"keywords": ["bomb"], "name": "words"}
        async with gateway(backend, filters=[SECRET, refuses]) as live:
            status, body = await live.post(ask("hi"), CHAT)
            assert (status, json.loads(body)["error"]["code"]) == (400, "content_filter")
            status, body = await live.post(ask("hi", stream=True), CHAT)
            *frames, last = body.removesuffix(b"\n\n").split(b"\n\n")
            assert status == 200
            assert texts(b"\n\n".join(frames)) == {0: "A [removed]. "}
            assert json.loads(last[6:])["error"]["code"] == "content_filter"
            assert live.state.metrics.requests[CHAT, "200", "filtered"] == 1
            assert live.state.router.loads[0].requests == 0

    run(main())


class Slow:
    """A hook of plain functions."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    async def before(self, about: About, body: dict[str, Any]) -> None:
        await asyncio.sleep(self.seconds)

    def after(self, about: About, text: str) -> str:
        if "crash" in text:
            raise KeyError(text)
        if "never" in text:
            raise Refused(f"{about.kind} of {about.model}")
        return text.upper()


def test_a_hook_that_fails_refuses_or_passes() -> None:
    hook = {"hook": f"{__name__}:Slow", "name": "hook", "timeout_s": 0.2}

    async def main() -> None:
        crash, fine = Scripted(streams("crash.")), Scripted(streams("fine."), models=("fine",))
        for then in ("refuse", "pass"):
            slow = hook | {"options": {"seconds": 5.0}, "on_failure": then, "name": "slow"}
            async with gateway(crash, fine, filters=[hook | {"on_failure": then}]) as live:
                status, body = await live.post(ask("hi"), CHAT)
                assert (status, b"crash." in body) == ((503, False) if then == "refuse" else (200, True))
                status, body = await live.post(ask("hi") | {"model": "fine"}, CHAT)
                assert b"FINE." in body
                assert live.state.filters is not None
                assert live.state.filters.counts["hook", "after", "changed"] == 1
            async with gateway(fine, filters=[slow]) as live:
                status, body = await live.post(ask("hi") | {"model": "fine"}, CHAT)
                assert status == (503 if then == "refuse" else 200)

    run(main())


def test_a_hook_that_returns_its_text_changes_nothing() -> None:
    async def main() -> None:
        async with gateway(
            Scripted(streams("LOUD.", " ENOUGH.")), filters=[{"hook": f"{__name__}:Slow"}]
        ) as live:
            _, body = await live.post(ask("hi", stream=True), CHAT)
            assert chat_frame("LOUD.") in body
            assert chat_frame(" ENOUGH.") in body

    run(main())


def test_a_service_decides() -> None:
    async def judge(request: Received, writer: asyncio.StreamWriter) -> None:
        said = request.body
        if said["when"] == "before":
            verdict = {"action": "change", "body": said["body"] | {"temperature": 0.5}}
        elif "never" in said["text"]:
            verdict = {"action": "refuse", "message": "not today"}
        else:
            verdict = {"action": "pass"}
        await answer(writer, 200, json.dumps(verdict).encode())

    async def main() -> None:
        service, backend = Scripted(judge), Scripted(streams("ever. ", "never."))
        async with gateway(service) as _, gateway(backend, filters=[{"url": service.url + "/judge"}]) as live:
            _, body = await live.post(ask("hi", stream=True), CHAT)
            assert backend.received[0].body["temperature"] == 0.5
            assert texts(body.rpartition(b"data: ")[0]) == {0: "ever. "}
            assert b"not today" in body
            service.ready = False

    run(main())


def test_stored_responses_pass_the_filters() -> None:
    item = {"type": "message", "content": [{"type": "output_text", "text": "a secret"}]}
    stored = {"id": "resp_1", "object": "response", "output": [item], "status": "completed"}

    async def main() -> None:
        async def script(request: Received, writer: asyncio.StreamWriter) -> None:
            await answer(writer, 200, json.dumps(stored).encode())

        async with gateway(Scripted(script), filters=[SECRET]) as live:
            status, body = await live.post({"model": "m", "input": "hi"}, "/v1/responses")
            assert (status, b"secret" in body) == (200, False)
            async with live.session.get(live.url + "/v1/responses/resp_1") as response:
                assert b"[removed]" in await response.read()

    run(main())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "nothing given; give one of hook, url, and keywords"),
        ({"hook": "a:B", "url": "http://x"}, "hook and url given"),
        ({"url": "ftp://x"}, "url = 'ftp://x' must be http"),
        ({"keywords": ["a"], "options": {"b": 1}}, "must be a table, and of a hook"),
        ({"keywords": ["a"], "on_failure": "open"}, "must be one of refuse, pass"),
    ],
)
def test_a_wrong_filter_is_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gateway_config({"filters": [data]})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"hook": "nowhere_at_all:Class"}, "No module named"),
        ({"hook": "json"}, "must be module:Class"),
        ({"patterns": ("(",)}, "is no pattern"),
    ],
)
def test_a_filter_that_cannot_be_made_is_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_filters([FilterConfig(FilterArgs("f", **args))], lambda: None)  # type: ignore[arg-type,return-value]


def test_a_moved_stream_is_filtered_once() -> None:
    words = ["One. ", "Two sec", "ret. ", "Three."]

    def tells(dies_after: int) -> Script:
        async def script(request: Received, writer: asyncio.StreamWriter) -> None:
            done = len(request.body["delivered"]) if "x-quire-resume" in request.headers else 0
            await begin_stream(writer, {"x-quire-tagged": "f"})
            for at in range(done, len(words)):
                if at >= dies_after:
                    writer.close()
                    return
                await chunk(writer, group([0, [at], 0], chat_frame(words[at])))
            await chunk(writer, group(0, b"data: [DONE]\n\n"))
            await chunk(writer, b"")

        return script

    async def main() -> None:
        dying, good = Quill(tells(2)), Quill(tells(9))
        settings = {"gateway_key": "k", "routing": {"policy": "round-robin"}, "filters": [SECRET]}
        async with gateway(dying, good, **settings) as live:
            status, body = await live.post(ask("hi", stream=True), CHAT)
            assert status == 200
            assert texts(body) == {0: "One. Two [removed]. Three."}
            assert live.state.metrics.migrations == {("b1",): 1}
            assert live.state.filters is not None
            counts = live.state.filters.counts
            assert (counts["secrets", "after", "passed"], counts["secrets", "after", "changed"]) == (2, 1)

    run(main())
