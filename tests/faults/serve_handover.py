"""A server over a `FakeFrontend`: ``python -m tests.faults.serve_handover PORT HOW STEP_MS BATCH_DIR [PEM PEM]``.

HOW: ``binds``; ``takes``: it takes over from the server of PORT; ``fails``: it tries to, and its engine cannot start.
``/version`` has its process.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.api.asgi_client import app_with_jobs
from tests.api.fake_frontend import FailingFrontend, FakeFrontend

from quire.api.server import run
from quire.errors import ConfigError
from quire.http.listen import bind, load_tls
from quire.http.takeover import Takeover
from quire.metrics.log import configure


def main(port: str, how: str, step_ms: str, batch_dir: str, *pem: str) -> int:
    configure("info")
    takeover = None
    if how != "binds":
        try:
            takeover = Takeover.from_address(("127.0.0.1", int(port)))
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
    kind = FailingFrontend if how == "fails" else FakeFrontend
    frontend = kind(max_model_len=1024, step_s=float(step_ms) / 1000)
    kept = {"batch_dir": batch_dir, "response_dir": Path(batch_dir, "responses")} if batch_dir else {}
    app = app_with_jobs(frontend, version=str(os.getpid()), **kept)
    sock = bind("127.0.0.1", int(port)) if takeover is None else takeover.sockets["api"]
    return run(app, sock=sock, drain_timeout_s=20, tls=load_tls(*pem) if pem else None, takeover=takeover)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
