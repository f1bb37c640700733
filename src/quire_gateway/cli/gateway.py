"""`quire gateway`: the configuration file, and flags that win over it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.args import ServerArgs, make_args
from quire.http.extension import Extension
from quire.jobs.routes import JobSettings, jobs_of
from quire.metrics.log import configure
from quire_gateway.config import GatewayArgs
from quire_gateway.config_file import read_config
from quire_gateway.filter_config import FilterArgs, FilterConfig
from quire_gateway.server import run_gateway
from quire_gateway.state import GatewayState


def gateway(path: Path, flags: dict[str, Any], hooks: Sequence[str], log_level: str, log_format: str) -> int:
    """Run the gateway of a configuration file until a signal; return the exit status."""
    settings = {key: value for key, value in flags.items() if value is not None}
    make_args(GatewayArgs, settings, origin="flag")
    make_args(ServerArgs, {"log_level": log_level, "log_format": log_format}, origin="flag")
    style: Any = log_format
    configure(log_level, style=style)
    config = read_config(path)
    sys.path.insert(0, str(Path.cwd()))  # hooks may be beside the configuration
    config = replace(
        config,
        server=replace(config.server, **settings),
        filters=(*config.filters, *(FilterConfig(FilterArgs(name=hook, hook=hook)) for hook in hooks)),
    )
    return run_gateway(config, extend=batches)


def batches(state: GatewayState) -> Extension:
    """Return ``/v1/files`` and ``/v1/batches`` of the gateway itself; they pause while prompts wait at the backends."""

    def is_busy() -> bool:
        is_up = state.pool is not None or any(b.is_ready for b in state.fleet)
        return not is_up or any(load.queued_tokens for load in state.router.loads)

    server = state.config.server
    settings = JobSettings(
        batch_dir=server.batch_dir,
        max_file_bytes=server.max_file_mib << 20,
        max_body_bytes=server.max_body_mib << 20,
        lenient=True,  # the backends say which fields they know
    )
    return jobs_of(settings, is_busy, time.time)
