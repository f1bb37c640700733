"""What coverage-guided fuzzing feeds bytes to: readers of what strangers send, and of what strangers publish.

A target may raise `QuireError`, which is a clear refusal; any other exception is a bug, and so is a run of seconds.
A target of a file is made with a folder of its own to write it to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.fuzz.seeds import fine_tokenizer
from tests.lora.peft_files import make_adapters
from tests.models.tiny import CONFIG

from quire.api.conversation import template_messages
from quire.api.dialects.anthropic.request import MessagesRequest, read_conversation
from quire.api.dialects.openai.fields import ChatRequest, CompletionRequest
from quire.api.dialects.openai.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from quire.api.dialects.responses.request import ResponsesRequest, add_input
from quire.api.job import given_sampling, sampling_params
from quire.errors import QuireError
from quire.http.body import decode
from quire.http.refusals import HttpError
from quire.http.wire import parse
from quire.jobs.form import read_form
from quire.lora.adapter import read_adapter
from quire.models.checkpoint import describe, read_tokenizer
from quire.models.hub import locate
from quire.models.safetensors_file import reading
from quire.text.chat_template import ChatTemplate

Target = Callable[[bytes], Any]
_LOOP = asyncio.Runner()  # one for all: making a loop takes longer than a form
REQUESTS = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)


def request(data: bytes) -> None:
    """A body of one of the endpoints, which the first byte chooses: JSON, wire model, sampling."""
    if not data:
        return
    body = decode(data[1:])
    asked = parse(REQUESTS[data[0] % len(REQUESTS)], body, ignored=[])
    if isinstance(asked, ChatRequest | CompletionRequest):
        sampling_params(given_sampling(asked), {}, max_tokens=4)
    if isinstance(asked, ChatRequest):
        template_messages(asked.messages, [])
    elif isinstance(asked, MessagesRequest):
        read_conversation(asked, [])
    elif isinstance(asked, ResponsesRequest):
        add_input([], asked.input, [])


def form(data: bytes) -> None:
    """A multipart form, which arrives in pieces: the first byte is their size, the second the boundary."""
    if len(data) < 3:
        return
    size, raw = data[0] + 1, data[2:]
    pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
    boundary = (b"b", b"--", b"b b", b'"b"')[data[1] % 4]
    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=" + boundary)]}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(0) if pieces else b"", "more_body": bool(pieces)}

    async def read() -> None:
        async with read_form(scope, receive, 1 << 20) as got:
            for item in got.values():
                if not isinstance(item, str):
                    await item.read()

    _LOOP.run(read())


def _of_file(folder: Path, name: str, read: Callable[[Path], object]) -> Target:
    """Return a target that writes its data to a file of this name, and reads that."""

    def target(data: bytes) -> None:
        (folder / name).write_bytes(data)
        read(folder / name)

    return target


def gguf(folder: Path) -> Target:
    """A GGUF file: header, metadata, tensors, and the vocabulary in it."""

    def read(path: Path) -> None:
        with contextlib.suppress(QuireError):
            read_tokenizer(path)
        describe(path)

    return _of_file(folder, "m.gguf", read)


def safetensors(folder: Path) -> Target:
    """A file of weights beside a fine config.json: header, shapes, offsets."""

    def read(path: Path) -> None:
        if not (path.parent / "config.json").exists():
            (path.parent / "config.json").write_text(json.dumps(CONFIG))
        describe(path.parent)

    return _of_file(folder, "model.safetensors", read)


def tokenizer(folder: Path) -> Target:
    """A tokenizer.json."""
    return _of_file(folder, "tokenizer.json", lambda path: read_tokenizer(path.parent))


def tokenizer_config(folder: Path) -> Target:
    """A tokenizer_config.json beside a fine tokenizer.json, with the chat template in it."""

    def read(path: Path) -> None:
        if not (path.parent / "tokenizer.json").exists():
            (path.parent / "tokenizer.json").write_bytes(fine_tokenizer())
        found = read_tokenizer(path.parent)
        with reading(path):
            ChatTemplate.of(found, datetime.now)

    return _of_file(folder, "tokenizer_config.json", read)


def sentencepiece(folder: Path) -> Target:
    """A sentencepiece model: protocol buffers."""
    return _of_file(folder, "tokenizer.model", lambda path: read_tokenizer(path.parent))


def tiktoken(folder: Path) -> Target:
    """A file of ranks."""
    return _of_file(folder, "t.tiktoken", lambda path: read_tokenizer(path.parent))


def config(folder: Path) -> Target:
    """A config.json of any family, without weights."""
    return _of_file(folder, "config.json", lambda path: describe(path.parent, "random"))


def adapter(folder: Path) -> Target:
    """A LoRA adapter: the first byte says whether its config or its weights follow, and the other file is fine."""
    spec = describe(locate("quill")).spec
    fine = Path(make_adapters(folder, spec)[2].path)
    files = fine / "adapter_config.json", fine / "adapter_model.safetensors"
    whole = [file.read_bytes() for file in files]

    def target(data: bytes) -> None:
        which = data[0] % 2 if data else 0
        rest = whole[1][len(data) - 1 :] if which else b""  # the head of the weights is what may be damaged
        files[which].write_bytes(data[1:] + rest)
        files[1 - which].write_bytes(whole[1 - which])
        read_adapter("a", fine, spec)

    return target


TARGETS: dict[str, Callable[[Path], Target]] = {
    "request": lambda folder: request,
    "form": lambda folder: form,
    "gguf": gguf,
    "safetensors": safetensors,
    "tokenizer": tokenizer,
    "tokenizer_config": tokenizer_config,
    "sentencepiece": sentencepiece,
    "tiktoken": tiktoken,
    "config": config,
    "adapter": adapter,
}
ALLOWED = (QuireError, HttpError)
