"""Images over HTTP: a server with a tiny model that sees, and what it refuses by the name of the field."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL", reason="the extra `images` is not installed")

import openai
from PIL import Image
from tests.e2e.live import LiveServer
from tests.images.tiny_vlm import make_image, make_model

PLACE = "messages[0].content[1].image_url.url"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("vlm")
    make_model(folder)
    command = ["-m", "quire.cli", "serve", str(folder), "--port", "0", "--served-model-name", "tiny",
               "--num-kv-blocks", "160", "--threads", "1", "--dtype", "float32"]  # fmt: skip
    with LiveServer(command, folder / "log") as live:
        yield live
        assert live.stop() == 0, live.log.read_text()


def url_of(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def ask(server: LiveServer, *urls: str, **fields: Any) -> httpx.Response:
    content = [{"type": "text", "text": "What is this?"}]
    content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]  # type: ignore[dict-item]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **fields}
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)


CAT = file_of(make_image(64, 50, 1))


def test_image_is_counted_and_cached(server: LiveServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        messages: Any = [
            {"role": "user", "content": [
                {"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url_of(CAT)}},
            ]}
        ]  # fmt: skip
        first, second = (
            client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0)
            for _ in range(2)
        )
    # Nine tiles and the whole, of four tokens each, and the words around them.
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens > 10 * 4
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) > 40
    assert first.choices[0].message.content == second.choices[0].message.content


def test_every_kind_of_pixels_is_read(server: LiveServer) -> None:
    image = make_image(40, 30, 2)
    files = {
        "jpeg": file_of(image, "JPEG"),
        "webp": file_of(image, "WEBP"),
        "cmyk": file_of(image.convert("CMYK"), "JPEG"),
        "gray": file_of(image.convert("L")),
        "palette": file_of(image.convert("P")),
        "alpha": file_of(image.convert("RGBA")),
    }
    for name, data in files.items():
        answer = ask(server, url_of(data))
        assert answer.status_code == 200, (name, answer.text)


HUGE = b"\x89PNG\r\n\x1a\n" + b"".join(
    len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)
    for kind, data in [
        (b"IHDR", (60_000).to_bytes(4) * 2 + b"\x08\x02\x00\x00\x00"),
        (b"IDAT", zlib.compress(b"\x00" * 1000)),
        (b"IEND", b""),
    ]
)
GIF = file_of(make_image(20, 20, 3), "GIF", save_all=True, append_images=[make_image(20, 20, 4)])
HOSTILE = {
    "bomb": (url_of(HUGE), "60000 × 60000 pixels"),
    "truncated": (url_of(CAT[: len(CAT) // 2]), "damaged"),
    "line": (url_of(file_of(Image.new("RGB", (10_000, 1)))), "one edge is more than"),
    "text": (url_of(b"hello"), "no image of a type that is supported"),
    "animated": (url_of(GIF, "gif"), "animated"),
    "other type": ("data:text/plain;base64,aGVsbG8=", "is no image"),
    "broken base64": ("data:image/png;base64,§§§", "not valid base64"),
    "empty": ("data:image/png;base64,", "empty"),
    "elsewhere": ("https://example.com/cat.png", "fetches nothing"),
    "file": ("file:///etc/passwd", "fetches nothing"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_image_is_refused_with_its_path(server: LiveServer, name: str) -> None:
    url, reason = HOSTILE[name]
    refusal = ask(server, url)
    assert refusal.status_code == 400, refusal.text
    error = refusal.json()["error"]
    assert error["param"] == PLACE
    assert reason in error["message"]
    assert ask(server, url_of(CAT)).status_code == 200


def test_what_is_not_supported_is_refused_by_name(server: LiveServer) -> None:
    cut = ask(server, url_of(CAT), truncate_prompt_tokens=8)
    assert (cut.status_code, cut.json()["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_placeholder_in_a_text_is_refused(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "An <image> of nothing"}], "max_tokens": 2}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "placeholder" in answer.json()["error"]["message"]
