"""A server with a real frontend and engine process over the fake executor: tokens from a hash, over real pages.

``python -m tests.e2e.serve_fake_engine MODEL TEMPLATE STEP_MS BATCH_DIR [MAX_MODEL_LEN]``
"""

from __future__ import annotations

import sys

from tests.api.asgi_client import app_with_jobs
from tests.fakes.engine import FAKE

from quire.api.server import run
from quire.args import EngineArgs, ServerArgs
from quire.cli.serve import admin_listener
from quire.clock import WallClock
from quire.device import detect_device
from quire.engine.assemble import configure, load_text
from quire.engine.frontend import Frontend
from quire.engine.process import ProcessClient
from quire.metrics.log import configure as configure_log


def main(model: str, template: str, step_ms: str, batch_dir: str, max_model_len: str = "512") -> int:
    configure_log("info")
    args = EngineArgs(model=model, num_kv_blocks=512, max_model_len=int(max_model_len))
    config, checkpoint = configure(args, detect_device())
    client = ProcessClient(config, executor=f"{FAKE}@{step_ms}")
    text = load_text(args, config, checkpoint, names=("tiny",), chat_template=template)
    frontend = Frontend(client, text.tokenizer, text.chat_template, text.model, WallClock())
    app = app_with_jobs(frontend, batch_dir=batch_dir)
    return run(app, port=0, admin=admin_listener(app, ServerArgs(admin_port=0)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
