"""A real server whose engine sleeps as a cost model says: ``python -m tests.sim.serve_timed COST.json [NAME=N…]``.

Everything but the executor is what `quire serve` runs: API process, engine process, scheduler and cache.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from quire.api.app import create_app
from quire.api.server import run
from quire.api.settings import ApiSettings
from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire.engine.assemble import configure, load_text
from quire.engine.frontend import Frontend
from quire.engine.process import ProcessClient


def main(cost: str, *settings: str) -> int:
    pairs = (setting.partition("=")[::2] for setting in settings)
    given: dict[str, Any] = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    port, gateway_key = given.pop("port", 0), given.pop("gateway_key", None)
    args = EngineArgs(**given)
    config, checkpoint = configure(args, detect_device())
    if gateway_key is not None:
        config = replace(config, cache=replace(config.cache, has_events=True))
    client = ProcessClient(config, executor=f"timed@{cost}")
    text = load_text(args, config, checkpoint, names=("quill",))
    frontend = Frontend(client, text.tokenizer, text.chat_template, text.model, WallClock())
    ready = "ready    on"
    return run(
        create_app(frontend, ApiSettings(gateway_key=gateway_key, cache=config.cache)),
        port=port,
        on_ready=lambda url, _: print(f"{ready} {url}", file=sys.stderr, flush=True),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
