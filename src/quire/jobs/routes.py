"""OpenAI's ``/v1/files`` and ``/v1/batches``; and `jobs_of`: all jobs, Anthropic's batches too, as an `Extension`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from pydantic import Field
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from quire.args import ServerArgs, defaults
from quire.errors import ConfigError, NotFoundError, RequestError, clip
from quire.http.body import read_json
from quire.http.call import call_of
from quire.http.edge import new_id
from quire.http.extension import Extension, Work
from quire.http.json_page import json_response, list_page
from quire.http.wire import Body, Ignored, Integer, Metadata, Text, Wire, not_allowed, parse
from quire.jobs.background import ROOT, BackgroundResponses
from quire.jobs.disk import MAX_STORE_BYTES, OPEN, within_disk
from quire.jobs.form import read_form
from quire.jobs.message_batches import HELD as MESSAGES_HELD
from quire.jobs.message_batches import MessageBatches, MessageBatchRequest, is_messages
from quire.private import private_folder
from quire.units import MIB

if TYPE_CHECKING:  # loaded with `--batch-dir` alone
    from quire.jobs.runner import BatchRunner

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_STAMPS = (
    "in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip
_OURS = ("output_expires_after_s", "validating_at", "created_s", "tenant", "cache_group", "key")
_SERVER = defaults(ServerArgs)
_EXPIRES_S = (3600, 2_592_000)  # OpenAI's: an hour to thirty days


class BatchRequest(Wire):
    """Body of ``POST /v1/batches``."""

    input_file_id: Text
    endpoint: Text
    completion_window: Annotated[str, Field(description="'24h', or another number with s, m, h or d")]
    metadata: Metadata | None = None
    output_expires_after: Annotated[
        dict[str, Any] | None, Field(description="an object with anchor and seconds")
    ] = None


class ExpiresAfter(Wire):
    """``expires_after``."""

    anchor: Annotated[str, Field(description="'created_at'", json_schema_extra={"const": "created_at"})]
    seconds: Annotated[Integer, Field(json_schema_extra={"minimum": _EXPIRES_S[0], "maximum": _EXPIRES_S[1]})]


# What the fields of a batch hold, for the description of the API.
_HOLDS = {
    "endpoint": {"enum": list(ENDPOINTS)},
    "completion_window": {"type": "string", "pattern": "^([1-9]|[12][0-9])d$"},
    "output_expires_after": {"anyOf": [ExpiresAfter, {"type": "null"}]},
}
_BODIES = {
    "/v1/batches": Body("Begin a batch of requests", BatchRequest, holds=_HOLDS),
    "/v1/messages/batches": Body("Begin a batch of messages", MessageBatchRequest, holds=MESSAGES_HELD),
}


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Settings of jobs. Without ``batch_dir`` there are no files and batches."""

    batch_dir: str | None = None
    batch_concurrency: int = _SERVER["batch_concurrency"]
    max_file_bytes: int = _SERVER["max_file_mib"] * MIB
    max_store_bytes: int = MAX_STORE_BYTES  # bytes of all files
    max_body_bytes: int = _SERVER["max_body_mib"] * MIB
    lenient: bool = False  # accept every unknown request field
    strict_fields: bool = False  # refuse every unknown request field


class JobRoutes:
    """The handlers. ``runner`` None: the server has no ``--batch-dir``."""

    def __init__(self, runner: BatchRunner | None, settings: JobSettings) -> None:
        self._started_runner = runner
        self._settings = settings

    def routes(self) -> list[Route]:
        return [
            Route("/v1/files", self.files, methods=["GET", "POST"]),
            Route("/v1/files/{file_id}", self.file, methods=["GET", "DELETE"]),
            Route("/v1/files/{file_id}/content", self.content, methods=["GET"]),
            Route("/v1/batches", self.batches, methods=["GET", "POST"]),
            Route("/v1/batches/{batch_id}", self.batch, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", self.cancel, methods=["POST"]),
            *MessageBatches(lambda: self._runner, self._settings.max_body_bytes, self._ignored).routes(),
        ]

    @property
    def _runner(self) -> BatchRunner:
        if self._started_runner is None:
            raise NotFoundError(
                "Files and batches are kept on disk, and this server has no place for them: start it with --batch-dir.",
                code="batches_disabled",
            )
        return self._started_runner

    async def files(self, request: Request) -> Response:
        """Upload a file (POST), or list the files."""
        if request.method == "POST":
            with within_disk():
                return await self._upload(request)
        files = [
            f
            for f in self._runner.files.all(call_of(request.scope).tenant)
            if f["purpose"] == request.query_params.get("purpose", f["purpose"])
        ]
        return list_page(request, files, default=10_000, most=10_000)

    async def file(self, request: Request) -> Response:
        """Return the object of a file, or delete the file."""
        file = self._file(request)
        if request.method != "DELETE":
            return json_response(file)
        if self._runner.uses(file["id"]):
            raise RequestError(
                f"{file['id']} is the input of a batch that has not ended: cancel the batch first.",
                param="file_id",
                code="file_in_use",
            )
        self._runner.files.delete(file["id"], call_of(request.scope).tenant)
        return json_response({"id": file["id"], "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        """The bytes of a file."""
        file = self._file(request)
        return FileResponse(self._runner.files.path(file["id"]), media_type="application/octet-stream")

    async def batches(self, request: Request) -> Response:
        """Begin a batch (POST), or list the batches."""
        if request.method == "POST":
            with within_disk():
                return await self._create(request)
        shown = [
            _shown(batch)
            for batch in self._runner.listed(call_of(request.scope).tenant)
            if not is_messages(batch)
        ]
        return list_page(request, shown, default=20, most=100)

    async def batch(self, request: Request) -> Response:
        """One batch: its state and its files."""
        return json_response(_shown(self._batch(request)))

    async def cancel(self, request: Request) -> Response:
        """End an open batch.

        Raises:
            RequestError: it has ended already.
        """
        batch = self._batch(request)
        if batch["status"] not in OPEN:
            raise RequestError(
                f"{batch['id']} is {batch['status']}: it cannot be cancelled.", param="batch_id"
            )
        if batch["status"] != "cancelling":
            with within_disk():
                batch = self._runner.cancel(batch["id"])
        return json_response(_shown(batch))

    async def _upload(self, request: Request) -> Response:
        runner = self._runner
        async with read_form(request.scope, request.receive, self._settings.max_file_bytes) as form:
            upload = form.get("file")
            texts = {name: item if isinstance(item, str) else "" for name, item in form.items()}
            values: dict[str, Any] = {name: text for name, text in texts.items() if name != "file"}
            expires = _bracketed(values, "expires_after")
            for name in values:
                if name != "purpose":
                    raise RequestError(f"Unknown field {clip(name)}.", param=name, code="unknown_parameter")
            if not isinstance(upload, UploadFile):
                raise RequestError(
                    "file is required: a part with a file name.",
                    param="file",
                    code="missing_required_parameter",
                )
            if values.get("purpose") != "batch":
                raise not_allowed("purpose", values.get("purpose"), "'batch'")
            after_s = None if expires is None else _expires_after(expires, "expires_after", self._ignored())
            name = upload.filename or "file"
            tenant = call_of(request.scope).tenant
            made = await asyncio.to_thread(runner.files.add, upload.file, name, "batch", tenant, after_s)
            return json_response(made)

    async def _create(self, request: Request) -> Response:
        runner, ignored, call = self._runner, self._ignored(), call_of(request.scope)
        body = await read_json(request.scope, request.receive, self._settings.max_body_bytes)
        batch = parse(BatchRequest, body, ignored=ignored)
        if batch.endpoint not in ENDPOINTS:
            raise not_allowed("endpoint", batch.endpoint, f"one of {', '.join(ENDPOINTS)}")
        window = _WINDOW.fullmatch(batch.completion_window)
        seconds = int(window[1]) * _SECONDS[window[2]] if window else 0
        if not 0 < seconds <= _EXPIRES_S[1]:
            allowed = "'24h', or another number with s, m, h or d, up to 30d"
            raise not_allowed("completion_window", batch.completion_window, allowed)
        source = runner.files.get(batch.input_file_id, call.tenant)
        if source is None or source["purpose"] != "batch":
            raise RequestError(
                f"input_file_id = {clip(batch.input_file_id)} is not a file with the purpose 'batch' here.",
                param="input_file_id",
            )
        expiry = batch.output_expires_after
        after_s = None if expiry is None else _expires_after(expiry, "output_expires_after", ignored)
        values = {**batch.model_dump(exclude={"output_expires_after"}), "output_expires_after_s": after_s}
        return json_response(_shown(runner.create(values, seconds, call)))

    def _ignored(self) -> Ignored:
        return Ignored.of(lenient=self._settings.lenient, strict=self._settings.strict_fields)

    def _file(self, request: Request) -> dict[str, Any]:
        file_id = request.path_params["file_id"]
        file = self._runner.files.get(file_id, call_of(request.scope).tenant)
        if file is None:
            message = f"There is no file {clip(file_id)} here."
            raise NotFoundError(message, param="file_id", code="file_not_found")
        return file

    def _batch(self, request: Request) -> dict[str, Any]:
        batch_id = request.path_params["batch_id"]
        batch = self._runner.get(batch_id, call_of(request.scope).tenant)
        if batch is None or is_messages(batch):
            message = f"There is no batch {clip(batch_id)} here."
            raise NotFoundError(message, param="batch_id", code="batch_not_found")
        return batch


def _shown(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the object that clients see: every time stamp, and none of the private fields."""
    stamps: dict[str, Any] = dict.fromkeys(_STAMPS)
    shown = {**stamps, **batch}
    return {name: value for name, value in shown.items() if name not in _OURS}


def _bracketed(values: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Take the ``name[key]`` fields, with which OpenAI's client sends an object, out of a form; return the object."""
    taken: dict[str, Any] = {}
    for key in [k for k in values if k.startswith(name + "[") and k.endswith("]")]:
        text = values.pop(key)
        taken[key[len(name) + 1 : -1]] = (
            int(text) if text.isascii() and text.isdigit() and len(text) < 19 else text
        )
    return taken or None


def _expires_after(body: dict[str, Any], name: str, ignored: list[str] | None) -> int:
    expiry = parse(ExpiresAfter, body, prefix=name + ".", ignored=ignored)
    low, high = _EXPIRES_S
    if expiry.anchor != "created_at":
        raise not_allowed(name + ".anchor", expiry.anchor, "'created_at'")
    if not low <= expiry.seconds <= high:
        raise not_allowed(name + ".seconds", expiry.seconds, f"an integer in {low}…{high}")
    return expiry.seconds


def jobs_of(
    settings: JobSettings,
    is_busy: Callable[[], bool],
    unix_time: Callable[[], float],
    is_ready: Callable[[], bool] = lambda: True,
) -> Extension:
    """Return the extension. ``is_busy`` tells whether requests of others wait: batches pause then.

    ``is_ready`` tells whether requests are taken: responses in the background that a restart goes on with wait for it.

    Raises:
        ConfigError: ``batch_dir`` cannot be used.
    """
    runner: BatchRunner | None = None
    root = None if settings.batch_dir is None else Path(settings.batch_dir)
    try:
        if root is not None:
            private_folder(root, is_ours=False)
            runner = _open_runner(root, settings, is_busy, unix_time)
        folder = None if root is None else root / "background"
        background = BackgroundResponses(settings.max_body_bytes, new_id, unix_time, is_ready, folder)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--batch-dir {root} cannot be used: {error}.") from error

    def start(app: Starlette) -> None:
        """Go on with the work of an earlier server."""
        background.start(app)
        if runner is not None:
            runner.resume(app)

    async def stop() -> list[Any]:
        """End the work; the next server continues from the state on disk."""
        if runner is not None:
            await runner.close()
        return await background.stop()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        start(app)
        try:
            yield
        finally:
            await stop()

    return Extension(
        JobRoutes(runner, settings).routes(),
        (ROOT, background.around),
        lifespan,
        _BODIES,
        Work(start, stop, background.adopt, is_on_disk=root is not None),
    )


def _open_runner(
    root: Path, settings: JobSettings, is_busy: Callable[[], bool], unix_time: Callable[[], float]
) -> BatchRunner:
    """Load the wing of files and batches, which a server without `--batch-dir` does not."""
    from quire.jobs.files import FileStore
    from quire.jobs.runner import BatchRunner

    files, most = FileStore(root, new_id, unix_time, settings.max_store_bytes), settings.batch_concurrency
    return BatchRunner(root, files, new_id=new_id, unix_time=unix_time, is_busy=is_busy, concurrency=most)
