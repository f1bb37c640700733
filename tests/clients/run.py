"""Run real clients against real servers: ``python -m tests.clients.run [NAME …] [--record] [--through gateway]``.

Each client of ``clients.toml`` gets an environment of its own below ``build/clients`` and talks to two servers: Quill
with a template for tools, and a scripted model behind the same API (`tests.clients.scripted`). A proxy in front of
both sees what the client sends; ``--record`` keeps one body of each shape in ``recorded/``, which the default tests
replay. Then the client runs once more with a gateway in front of each server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from tests.e2e.live import LiveServer

HERE = Path(__file__).parent
CLIENTS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "clients.toml").read_text())
ENVIRONMENTS = Path(os.environ.get("QUIRE_CLIENTS_DIR", HERE.parents[1] / "build" / "clients"))
TIMEOUT_S = 600
LONG = 60  # characters of a text
QUILL = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1", "--num-kv-blocks", "4096",
         "--chat-template", str(HERE / "hermes.jinja")]  # fmt: skip
# Bodies that name what only the server of the recording holds.
STATEFUL = ("previous_response_id", "input_file_id", "requests")
HOP = {"content-length", "transfer-encoding", "connection", "content-encoding"}


@dataclass
class Recorder:
    """A proxy that keeps one JSON body per path and shape."""

    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def before(self, url: str, server: str) -> AsyncIterator[str]:
        """Yield the address that stands for ``url``."""
        async with aiohttp.ClientSession(auto_decompress=False) as session:

            async def relay(request: web.Request) -> web.StreamResponse:
                return await self._relay(session, url, server, request)

            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{path:.*}", relay)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
            await runner.cleanup()

    async def _relay(
        self, session: aiohttp.ClientSession, url: str, server: str, request: web.Request
    ) -> web.StreamResponse:
        data = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP | {"host"}}
        async with session.request(
            request.method, url + request.path_qs, data=data or None, headers=headers
        ) as answer:
            self._keep(server, request, data, answer)
            out = web.StreamResponse(status=answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in HOP:
                    out.headers.add(name, value)
            await out.prepare(request)
            async for chunk in answer.content.iter_any():
                await out.write(chunk)
            await out.write_eof()
            return out

    def _keep(self, server: str, request: web.Request, data: bytes, answer: aiohttp.ClientResponse) -> None:
        if answer.status >= 400:
            self.refused.append(f"{request.method} {request.path}: {answer.status}")
        try:
            body = json.loads(data)
        except ValueError:
            return
        if (
            not isinstance(body, dict)
            or any(body.get(name) for name in STATEFUL)
            or b"item_reference" in data
        ):
            return
        ignored = answer.headers.get("x-quire-ignored-fields", "")
        entry = {
            "path": request.path,
            "server": server,
            "status": answer.status,
            "ignored": ignored,
            "body": body,
        }
        self.kept.setdefault(f"{request.path} {answer.status} {shape(body)}", entry)


def shape(value: Any) -> str:
    """Return what of a body can matter to a reader: names, types and short words; texts only as such."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{shape(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(sorted({shape(item) for item in value})) + "]"
    return type(value).__name__


def shortened(value: Any) -> Any:
    """Return a body without its long texts and descriptions; a call that the scripted model repeats stays."""
    if isinstance(value, dict):
        texts = {name for name, item in value.items() if name == "description" and isinstance(item, str)}
        return {name: "what it does" if name in texts else shortened(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, str) and len(value) > LONG and not value.startswith("CALL "):
        return f"{len(value)} characters"
    return value


def environment(name: str) -> Path:
    """Return the interpreter of a client's environment, which is made where its packages changed."""
    runs_on = CLIENTS[name].get("runs_on")
    if runs_on == "java":
        return java()
    if runs_on is not None:
        return node_folder(name)
    wanted = json.dumps(CLIENTS[name], sort_keys=True)
    folder = ENVIRONMENTS / name
    python, mark = folder / "bin" / "python", folder / "installed.json"
    if mark.exists() and mark.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-qq"]
    subprocess.run([*pip, *CLIENTS[name]["packages"]], check=True)
    mark.write_text(wanted)
    return python


def java() -> Path:
    """Return the JDK's launcher, which compiles and runs a source file."""
    launcher = shutil.which("java")
    if launcher is None or shutil.which("javac") is None:
        raise SystemExit(
            "jdk needs a JDK: apt-get install openjdk-17-jdk-headless, or name the other clients"
        )
    return Path(launcher)


def node_folder(name: str) -> Path:
    """Return what runs the script: node, beside a folder of the client's packages; for an agent this interpreter."""
    node, client = shutil.which("node"), CLIENTS[name]
    if node is None:
        raise SystemExit(f"{name} needs node and npm: install them, or name the other clients")
    folder = ENVIRONMENTS / name
    folder.mkdir(parents=True, exist_ok=True)
    wanted, mark = json.dumps(client, sort_keys=True), folder / "installed.json"
    if not mark.exists() or mark.read_text() != wanted:
        npm = ["npm", "install", "--no-fund", "--no-audit", "--loglevel=error", *client["packages"]]
        subprocess.run(npm, cwd=folder, check=True)
        mark.write_text(wanted)
    if client["runs_on"] == "agent":
        return Path(sys.executable)
    shutil.copy(HERE / "real" / client["script"], folder)
    return Path(node)


async def run_client(name: str, quill: str, scripted: str, *, record: bool) -> list[dict[str, Any]]:
    """Return the lines of one client's checks; write its bodies where asked to."""
    client = CLIENTS[name]
    recorder = Recorder()
    interpreter = environment(name)
    folder = ENVIRONMENTS / name if client.get("runs_on") == "node" else HERE / "real"
    command = [str(interpreter), str(folder / client["script"]), name]
    async with recorder.before(quill, "quill") as first, recorder.before(scripted, "scripted") as second:
        env = {**os.environ, "QUILL_URL": first, "SCRIPTED_URL": second, "NO_PROXY": "127.0.0.1"}
        env.pop("PYTHONPATH", None)
        if client.get("runs_on") == "agent":
            bin_folder = ENVIRONMENTS / name / "node_modules" / ".bin"
            env |= {"AGENT_BIN": str(bin_folder), "QUIRE_PATH": str(HERE.parents[1] / "src")}
        process = await asyncio.create_subprocess_exec(
            *command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
        except TimeoutError:
            process.kill()
            out, err = await process.communicate()
    # A client that prints from threads of its own may write before and after a check on the same line.
    text, read = out.decode(), json.JSONDecoder().raw_decode
    checks = [read(text, match.start())[0] for match in re.finditer(re.escape('{"check"'), text)]
    if not checks or (process.returncode and all(check["error"] is None for check in checks)):
        tail = err.decode(errors="replace")[-2000:]
        checks.append({"check": "the script ends", "error": f"status {process.returncode}: {tail}"})
    if record and "unrecorded" not in client:
        entries = list(recorder.kept.values())
        if client.get("runs_on") == "agent":  # whose instructions are long, and their makers'
            entries = [entry | {"body": shortened(entry["body"])} for entry in entries]
        lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
        (HERE / "recorded" / f"{name}.json").write_text(f"[\n{lines}\n]\n")
    for line in recorder.refused:
        print(f"    refused: {line}")
    return checks


async def run_all(names: list[str], ways: list[str], *, record: bool) -> int:
    """Run the named clients one after the other and print a table; return how many checks failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)

        def start(command: list[str], name: str, **more: Any) -> str:
            return stack.enter_context(LiveServer(command, folder / f"{name}.log", **more)).url

        urls = {}
        if "texts" in map(servers_of, names):
            urls["texts", "direct"] = (
                start([*QUILL, "--batch-dir", f"{folder}/a"], "quill"),
                start(["-m", "tests.clients.scripted", f"{folder}/b"], "scripted"),
            )
        if "encoders" in map(servers_of, names):
            urls["encoders", "direct"] = encoders(folder, start)
        if "gateway" in ways:
            for (kind, _), pair in tuple(urls.items()):
                first, second = (
                    gateway(url, folder / f"gateway_{kind}{i}", start) for i, url in enumerate(pair)
                )
                urls[kind, "gateway"] = first, second
        for name in names:
            for way in ways:
                pair = urls[servers_of(name), way]
                checks = await run_client(name, *pair, record=record and way == "direct")
                bad = [check for check in checks if check["error"] is not None]
                failed += len(bad)
                packages = " ".join(CLIENTS[name]["packages"])
                print(
                    f"{name:16} {way:8} {packages:48} {len(checks) - len(bad)} of {len(checks)}", flush=True
                )
                for check in bad:
                    print(f"    {check['check']}: {check['error']}", flush=True)
    return failed


def servers_of(name: str) -> str:
    """Return which servers a client talks to: "texts", or "encoders"."""
    return str(CLIENTS[name].get("servers", "texts"))


def encoders(folder: Path, start: Callable[..., str]) -> tuple[str, str]:
    """Start a model of vectors and one that ranks, tiny and with random weights; return their addresses."""
    subprocess.run([sys.executable, "-m", "tests.encoders.tiny", str(folder)], check=True)
    more = ["--port", "0", "--threads", "1", "--served-model-name", "quill"]
    first, second = (
        start(["-m", "quire.cli", "serve", str(folder / name), *more], f"{name}_server")
        for name in ("vectors", "ranks")
    )
    return first, second


def gateway(url: str, folder: Path, start: Callable[..., str]) -> str:
    """Start a gateway in front of ``url``, with files and batches of its own; return its address."""
    folder.mkdir()
    config = folder / "gateway.toml"
    config.write_text(f'port = 0\nbatch_dir = "{folder}/batches"\n[[backends]]\nurl = "{url}"\n')
    command = ["-m", "quire.cli", "gateway", "--config", str(config)]
    return start(command, folder.name, ready=r"gateway +on (\S+),")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)} (all)")
    ways = ["direct", "gateway"]
    parser.add_argument("--through", choices=ways, help="only so; both, one after the other, without it")
    parser.add_argument("--record", action="store_true", help="write recorded/NAME.json")
    args = parser.parse_args()
    if unknown := set(args.names) - set(CLIENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    ways = ways if args.through is None else [args.through]
    return 1 if asyncio.run(run_all(args.names or list(CLIENTS), ways, record=args.record)) else 0


if __name__ == "__main__":
    sys.exit(main())
