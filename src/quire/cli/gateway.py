"""`quire gateway`: the configuration file, and flags that win over it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.args import ServerArgs, make_args
from quire.gateway.config import GatewayArgs, read_config
from quire.gateway.server import run_gateway
from quire.metrics.log import configure


def gateway(path: Path, flags: dict[str, Any], log_level: str, log_format: str) -> int:
    """Run the gateway of a configuration file until a signal; return the exit status."""
    given = {key: value for key, value in flags.items() if value is not None}
    make_args(GatewayArgs, given, origin="flag")
    make_args(ServerArgs, {"log_level": log_level, "log_format": log_format}, origin="flag")
    style: Any = log_format
    configure(log_level, style=style)
    config = read_config(path)
    return run_gateway(replace(config, server=replace(config.server, **given)))
