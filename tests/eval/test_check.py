"""`quire serve --check`: a KL is printed before anything is served, and above --max-kl nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.args import EngineArgs
from quire.cli.table import from_table
from quire.errors import ConfigError

CHECK = from_table("serve --check")
ENGINE = EngineArgs(model="quill", quantize="int4", threads=1)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "held.txt"
    path.write_text("The morning was cold, and the harbour lay empty under a grey sky. Nobody spoke. " * 8)
    return str(path)


def test_a_model_near_its_original_is_served(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    CHECK(ENGINE, text, 0.5)
    said = capsys.readouterr().err
    assert "mean KL from fp32 0.0" in said
    assert text in said


def test_a_model_far_from_its_original_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="max_kl = 1e-06: nothing is served"):
        CHECK(ENGINE, text, 1e-6)


def test_max_kl_needs_a_text() -> None:
    with pytest.raises(ConfigError, match="max_kl needs check"):
        CHECK(ENGINE, None, 0.1)
