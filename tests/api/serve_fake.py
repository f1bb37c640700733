"""A server process over a `FakeFrontend`: ``python -m tests.api.serve_fake STEP_MS DRAIN_S [ANSWER …]``.

After ANSWER: the folder of batches, and the PEM files of a certificate and its key.

ANSWER is what the model writes, in the format hermes; without it, or empty, the fake's own answer.
"""

from __future__ import annotations

import sys

from tests.api.asgi_client import app_with_jobs
from tests.api.fake_frontend import FakeFrontend, default_script, say

from quire.api.server import run
from quire.http.listen import load_tls
from quire.metrics.log import configure


def main(step_ms: str, drain_s: str, answer: str = "", batch_dir: str = "", *pem: str) -> int:
    configure("info")
    script = default_script if not answer else lambda prompt, index, seed: say(answer)
    frontend = FakeFrontend(script, max_model_len=1024, step_s=float(step_ms) / 1000, thinks=bool(answer))
    app = app_with_jobs(frontend, tool_format="hermes", batch_dir=batch_dir or None)
    tls = load_tls(*pem) if pem else None
    return run(
        app, port=0, drain_timeout_s=float(drain_s), on_ready=lambda url, _: print(url, flush=True), tls=tls
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
