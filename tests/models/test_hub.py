"""`locate`: local names first, then the hub; every failure is one line that says what to do. No network here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from quire.errors import ModelLoadError
from quire.models.hub import locate

pytestmark = pytest.mark.component

FILES = ["config.json", "model-00001-of-00001.safetensors", "consolidated.safetensors", "pytorch_model.bin"]
GGUFS = ["m-Q8_0.gguf", "m-F16.gguf", "m-BF16.gguf"]


class Hub:
    """Stands in for the two calls to the hub; records what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.files: list[str] = []
        self.error: Exception | None = None
        self.cached = False
        self.asked: dict[str, Any] = {}
        self.folder = folder
        monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda api, repo, revision: self.list())
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def list(self) -> list[str]:
        if self.error is not None:
            raise self.error
        return self.files

    def download(self, repo: str, **options: Any) -> str:
        if options.get("local_files_only") and not self.cached:
            raise hub_errors.LocalEntryNotFoundError("not in the cache")
        self.asked = {"repo": repo, **options}
        for file in self.files:
            (self.folder / file).touch()
        return str(self.folder)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return Hub(monkeypatch, tmp_path)


def http_error(kind: type[Exception]) -> Exception:
    """An error of huggingface_hub without the response it is built from."""
    error = kind.__new__(kind)
    Exception.__init__(error, "the server said so\nand more")
    return error


def test_local_names(tmp_path: Path, hub: Hub) -> None:
    assert locate(str(tmp_path)) == tmp_path
    for name in GGUFS:
        (tmp_path / name).touch()
    assert locate(str(tmp_path / "m-F16.gguf")) == tmp_path / "m-F16.gguf"
    assert locate(f"{tmp_path}:q8_0") == tmp_path / "m-Q8_0.gguf"
    assert locate(f"{tmp_path}:F16") == tmp_path / "m-F16.gguf"  # BF16 has it in its name too
    with pytest.raises(ModelLoadError, match=r"no GGUF file with 'Q4_K_M'.*m-Q8_0\.gguf"):
        locate(f"{tmp_path}:Q4_K_M")


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./nothing", "~/nothing-here", "model.gguf", "a/b/c", " "]
)
def test_paths_that_are_not_there(name: str, hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match="there is no file or folder") as caught:
        locate(name)
    assert "quill" in str(caught.value)


def test_a_bare_name(hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match="did you mean 'quill'"):
        locate("quil")


def test_a_repository(tmp_path: Path, hub: Hub) -> None:
    hub.files = FILES
    assert locate("org/model", revision="v1", token="t") == tmp_path
    assert hub.asked["repo"] == "org/model"
    assert (hub.asked["revision"], hub.asked["token"]) == ("v1", "t")
    assert "model-00001-of-00001.safetensors" in hub.asked["allow_patterns"]
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & set(hub.asked["allow_patterns"])


def test_one_gguf_of_a_repository(tmp_path: Path, hub: Hub) -> None:
    hub.files = GGUFS
    assert locate("org/model:Q8_0") == tmp_path / "m-Q8_0.gguf"
    assert hub.asked["allow_patterns"] == ["m-Q8_0.gguf"]
    with pytest.raises(ModelLoadError, match=r"org/model:QUANT.*m-F16"):
        locate("org/model")


def test_a_repository_of_pickles(hub: Hub) -> None:
    hub.files = ["config.json", "pytorch_model.bin"]
    with pytest.raises(ModelLoadError, match="no safetensors and no GGUF"):
        locate("org/model")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (hub_errors.GatedRepoError, "is gated: accept its terms.*HF_TOKEN"),
        (hub_errors.RepositoryNotFoundError, "no repository 'org/model'.*HF_TOKEN"),
        (hub_errors.RevisionNotFoundError, "no revision 'v9'"),
        (hub_errors.OfflineModeIsEnabled, "cannot be reached.*quill"),
        (hub_errors.HfHubHTTPError, "cannot be reached.*the server said so.*quill"),
        (ConnectionError, "cannot be reached.*quill"),
        (hub_errors.HFValidationError, "no repository 'org/model'"),
    ],
)
def test_failures_of_the_hub(kind: type[Exception], says: str, hub: Hub) -> None:
    hub.error = http_error(kind)
    with pytest.raises(ModelLoadError, match=says) as caught:
        locate("org/model", revision="v9")
    assert "\n" not in str(caught.value)


def test_the_cache_serves_when_the_hub_does_not(tmp_path: Path, hub: Hub) -> None:
    hub.error, hub.cached, hub.files = http_error(ConnectionError), True, [*FILES, *GGUFS]
    assert locate("org/model") == tmp_path
    assert hub.asked["local_files_only"]
    assert locate("org/model:Q8_0") == tmp_path / "m-Q8_0.gguf"


def test_offline_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real huggingface_hub, told to stay offline and with an empty cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE is set"):
        locate("org/model")
