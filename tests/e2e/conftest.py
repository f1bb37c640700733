"""One server for each kind of engine, for the whole session; OpenAI's client in front of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import openai
import pytest
from tests.e2e.live import LiveServer

from quire.models.hub import quill_path

# Not Quill's own: a story to go on with is the whole of it.
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
FAKE_STEP_MS = 3


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LiveServer]]:
    """Start each kind of server once per session, in whichever order the files of tests ask for them."""
    running: dict[str, LiveServer] = {}
    with ExitStack() as stack:

        def start_once(kind: str) -> LiveServer:
            if kind not in running:
                running[kind] = stack.enter_context(serving(kind, tmp_path_factory.mktemp(kind)))
            return running[kind]

        yield start_once


@pytest.fixture(scope="session", params=["fake", "quill", pytest.param("gateway", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, start: Callable[[str], LiveServer]) -> LiveServer:
    """A live server with Quill's tokenizer: the fake executor, the real model, or the fake behind a gateway."""
    return start(request.param)


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[LiveServer]:
    """Serve while the block runs; at its end SIGTERM ends each process with status 0."""
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    model = str(quill_path("quill"))
    if kind in ("fake", "gateway"):
        command = ["-m", "tests.e2e.serve_fake_engine", model, str(template), str(FAKE_STEP_MS),
                   str(folder / "batches")]  # fmt: skip
    else:
        command = ["-m", "quire.cli", "serve", model, "--port", "0", "--chat-template", str(template),
                   "--served-model-name", "tiny", "--num-kv-blocks", "512", "--max-model-len", "512", "--threads", "1",
                   "--admin-port", "0", "--batch-dir", str(folder / "batches")]  # fmt: skip
    with LiveServer(command, folder / "log") as live:
        if kind == "gateway":
            with behind_gateway(live, folder) as front:
                yield live
                assert front.stop() == 0, front.log.read_text()
        else:
            yield live
        assert live.stop() == 0, live.log.read_text()


@contextmanager
def behind_gateway(live: LiveServer, folder: Path) -> Iterator[LiveServer]:
    """Put a gateway in front of a server: from then on ``live.url`` is the gateway's."""
    config = folder / "gateway.toml"
    config.write_text(f'port = 0\nbatch_dir = "{folder}/gateway-batches"\n[[backends]]\nurl = "{live.url}"\n')
    command = ["-m", "quire.cli", "gateway", "--config", str(config)]
    with LiveServer(
        command, folder / "gateway.log", ready=r"(?s)listening url=(\S+).*backend_ready"
    ) as front:
        live.url = front.url
        yield front


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def is_real(server: LiveServer) -> bool:
    """Whether a model stands behind the server; the fake one's log-probabilities mean nothing."""
    return "quire.cli" in server.process.args  # type: ignore[operator]
