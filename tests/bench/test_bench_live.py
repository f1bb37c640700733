"""`quire bench serve` on a live server whose steps sleep: the client's figures against the server's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.live import LiveServer

from quire.models.hub import quill_path
from quire_lab.bench.args import ServeBenchArgs
from quire_lab.bench.serve import run

STEP_MS = 20.0


@pytest.mark.slow
def test_client_and_server_agree(tmp_path: Path) -> None:
    """Means over the same requests: the server's histograms, and the client's records, which lie outside of them."""
    template, out = tmp_path / "template.jinja", str(tmp_path / "a.json")
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    command = [
        "-m",
        "tests.e2e.serve_fake_engine",
        str(quill_path("quill")),
        str(template),
        str(STEP_MS),
        str(tmp_path),
    ]
    with LiveServer(command, tmp_path / "log") as server:

        def totals() -> list[float]:
            names = ("time_to_first_token_seconds", "request_time_per_output_token_seconds")
            return [server.metric(f"vllm:{name}_{part}") for name in names for part in ("sum", "count")]

        flags = ServeBenchArgs(url=server.url, limit=40, rate=10.0, input_len="48", output_len="16", json=out)
        assert run(flags) == 0
        after = totals()
    # The warm-up request is among the server's; it is one of 41.
    assert after[1] == after[3] == 41
    found = json.loads(Path(out).read_text())
    server_ttft_ms, server_tpot_ms = 1e3 * after[0] / after[1], 1e3 * after[2] / after[3]
    assert found["tpot_ms"]["mean"] == pytest.approx(server_tpot_ms, rel=0.02, abs=1.0)
    assert (
        -1.0 <= found["ttft_ms"]["mean"] - server_ttft_ms <= 5.0
    )  # the way there and back, and reading the request
    assert found["tpot_ms"]["p50"] >= STEP_MS
    assert found["num_output_tokens"] == 40 * 16
