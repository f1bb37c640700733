"""LoRA on a live server, with OpenAI's client: by model name, at once, loaded and unloaded, over a killed engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.e2e.asking import PROMPT
from tests.e2e.live import LiveServer
from tests.lora.peft_files import make_adapters

from quire.models.checkpoint import describe
from quire.models.hub import quill_path
from quire.request import Adapter

NAMES = (None, "adapter-0", "adapter-1")  # None: the base model


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Adapter, ...]:
    folder = tmp_path_factory.mktemp("adapters")
    return make_adapters(folder, describe(quill_path("quill")).spec)


@pytest.fixture(scope="module")
def live(adapters: tuple[Adapter, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two slots; two adapters from the start."""
    model = str(quill_path("quill"))
    command = ["-m", "quire.cli", "serve", model, "--port", "0", "--served-model-name", "tiny", "--num-kv-blocks",
               "512", "--max-model-len", "512", "--threads", "1", "--admin-port", "0", "--max-lora-rank",
               "17"]  # fmt: skip
    for adapter in adapters[:2]:
        command += ["--lora", f"{adapter.name}={adapter.path}"]
    with LiveServer(command, tmp_path_factory.mktemp("server") / "log") as server:
        yield server
        assert server.stop() == 0, server.log.read_text()


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def admin(live: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.admin_url, timeout=60) as made:
        yield made


def text_of(client: openai.OpenAI, model: str | None, **more: Any) -> str:
    fields = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 3, **more}
    answer = client.completions.create(model=model or "tiny", **fields)
    assert answer.model == (model or "tiny")
    return answer.choices[0].text


def test_models_are_listed_with_their_parent(client: openai.OpenAI, adapters: tuple[Adapter, ...]) -> None:
    cards = {card.id: card for card in client.models.list()}
    assert list(cards) == ["tiny", "adapter-0", "adapter-1"]
    assert cards["tiny"].parent is None  # type: ignore[attr-defined]
    for adapter in adapters[:2]:
        assert cards[adapter.name].parent == "tiny"  # type: ignore[attr-defined]
        assert cards[adapter.name].root == adapter.path  # type: ignore[attr-defined]
    assert client.models.retrieve("adapter-1").id == "adapter-1"


def test_the_model_selects_the_adapter_alone_and_together(client: openai.OpenAI) -> None:
    alone = [text_of(client, name) for name in NAMES]
    assert len(set(alone)) == 3
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda i: text_of(client, NAMES[i % 3]), range(12)))
    assert together == alone * 4
    stream = client.completions.create(
        model="adapter-1", prompt=PROMPT, max_tokens=24, temperature=0.8, seed=3, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == alone[2]


def test_an_unknown_model_lists_what_is_loaded(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'adapter-0', 'adapter-1'") as caught:
        text_of(client, "adapter-9")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_loaded_and_unloaded_at_run_time(
    client: openai.OpenAI, admin: httpx.Client, adapters: tuple[Adapter, ...], tmp_path: Path
) -> None:
    third = adapters[2]
    before = [text_of(client, name) for name in NAMES]
    loaded = admin.post("/lora", json={"lora_name": "third", "lora_path": third.path})
    assert loaded.json() | {"rank": 17, "path": third.path, "id": "third"} == loaded.json()
    assert [card["id"] for card in admin.get("/lora").json()["data"]] == ["adapter-0", "adapter-1", "third"]
    names = (*NAMES, "third")
    with ThreadPoolExecutor(12) as pool:  # three adapters, two slots
        texts = list(pool.map(lambda i: text_of(client, names[i % 4]), range(16)))
    assert texts == [*before, texts[3]] * 4
    again = admin.post("/v1/load_lora_adapter", json={"lora_name": "third", "lora_path": third.path})
    assert again.status_code == 400
    assert "loaded already" in again.json()["error"]["message"]
    for path, text in ((str(tmp_path), "no adapter_config.json"), ("/nowhere", "there is no folder")):
        refused = admin.post("/lora", json={"lora_name": "bad", "lora_path": path})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "lora_path"
        assert text in refused.json()["error"]["message"]
    stream = client.completions.create(model="third", prompt=PROMPT, max_tokens=60, seed=3, stream=True)
    next(stream)
    gone = admin.post("/v1/unload_lora_adapter", json={"lora_name": "third"})
    assert gone.text.startswith("Success")
    assert "still run" not in gone.text, "it waits for those who use it"
    assert list(stream)[-1].choices[0].finish_reason in ("length", "stop")
    with pytest.raises(openai.NotFoundError, match="'third' is not served"):
        text_of(client, "third")
    assert admin.delete("/lora/third").status_code == 404


def test_a_restarted_engine_keeps_the_adapters(live: LiveServer, client: openai.OpenAI) -> None:
    alone = text_of(client, "adapter-0", max_tokens=100)
    stream = client.completions.create(
        model="adapter-0", prompt=PROMPT, max_tokens=100, temperature=0.8, seed=3, stream=True
    )
    text = next(stream).choices[0].text
    pid = live.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"quire: engine" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)
    assert text + "".join(chunk.choices[0].text for chunk in stream) == alone
    assert text_of(client, "adapter-0", max_tokens=100) == alone
