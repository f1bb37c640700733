"""`make gateway-demo` ends at once, with the log that says why, when a process of it has ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.gateway_demo import awaited, start

pytestmark = pytest.mark.system


def test_the_demo_ends_when_a_process_of_it_has(tmp_path: Path) -> None:
    (tmp_path / "absent.toml").write_text("no_such_key = 1\n")
    child = start(tmp_path, "gateway", ["gateway", "--config", str(tmp_path / "absent.toml")])
    with pytest.raises(SystemExit, match=r"gateway has ended with status 1:\nquire: .*no_such_key"):
        awaited(tmp_path, [child], "listening", 1)
