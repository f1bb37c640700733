"""`jobs_of`: files, batches and background responses as an `Extension` of an application."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from starlette.applications import Starlette

from quire.errors import ConfigError
from quire.http.edge import Extension, id_source
from quire.http.wire import Body
from quire.jobs.background import ROOT, BackgroundResponses
from quire.jobs.files import FileStore
from quire.jobs.routes import BatchRequest, JobRoutes, JobSettings
from quire.jobs.runner import BatchRunner


def jobs_of(settings: JobSettings, is_busy: Callable[[], bool], unix_time: Callable[[], float]) -> Extension:
    """Return the extension. ``is_busy`` tells whether requests of others wait: batches pause then.

    Raises:
        ConfigError: ``batch_dir`` cannot be used.
    """
    new_id = id_source()
    runner: BatchRunner | None = None
    if settings.batch_dir is not None:
        root = Path(settings.batch_dir)
        try:
            files = FileStore(root, new_id, unix_time)
            runner = BatchRunner(
                root,
                files,
                new_id=new_id,
                unix_time=unix_time,
                is_busy=is_busy,
                concurrency=settings.batch_concurrency,
            )
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--batch-dir {root} cannot be used: {error}.") from error

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None, None]:
        """Run batches, beginning with those of an earlier server; the next server continues from the state on disk."""
        if runner is None:
            yield
            return
        runner.resume(app)
        try:
            yield
        finally:
            await runner.close()

    return Extension(
        JobRoutes(runner, settings, unix_time).routes(),
        (ROOT, BackgroundResponses(settings.max_body_bytes).around),
        lifespan,
        {"/v1/batches": Body("Begin a batch of requests", BatchRequest)},
    )
