"""Weights that are kept packed: the same bytes and tokens as packed anew, and never those of another checkpoint."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.checks import SEED
from tests.models.tiny import CONFIG, tensors, write_model
from tests.quant.checkpoints import make
from tests.quant.test_checkpoints import CASES

from quire import LLM, SamplingParams
from quire.args import EngineArgs
from quire.cli.doctor import packed_weights
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.executor.local import LocalExecutor
from quire.kernels.linear.packed import PackedLinear
from quire.models import packed_cache, packed_file

pytest.importorskip("quire._native")
WAIT_S = 60.0
BIG = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 200, "torch_dtype": "bfloat16"}
MIXTURE = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "QUIET_S", 0.0)


def checkpoint(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {**CONFIG, **BIG, **changes}
    return write_model(folder, tensors(torch.bfloat16, config), **{**BIG, **changes})


def started(path: Path, cache: Path | str, **settings: Any) -> LocalExecutor:
    args = EngineArgs(model=str(path), packed_cache=str(cache), threads=2, num_kv_blocks=16, **settings)
    return LocalExecutor(configure(args, detect_device())[0])


def packed_bytes(executor: LocalExecutor) -> list[bytes]:
    """All memory of matrices, quantized or not."""
    found: dict[int, PackedLinear] = {}
    decoder = executor.worker.runner.decoder
    for loader in decoder._loaders.values():
        found.update((id(matrix), matrix) for matrix in getattr(loader, "matrices", ()))
    parts = [p for m in found.values() for p in (m.data, m.scale, m.offset, m.bias) if p is not None]
    return [part.view(torch.uint8).numpy().tobytes() for part in parts]


def was_read(executor: LocalExecutor) -> bool:
    return executor.saver is None


def kept(cache: Path, num_files: int = 1) -> list[Path]:
    """Wait for the files that savers write."""
    end_s = time.monotonic() + WAIT_S
    while len(found := sorted(cache.glob("*.packed"))) < num_files:
        assert time.monotonic() < end_s, list(cache.iterdir()) if cache.exists() else "no folder"
        time.sleep(0.01)
    return found


def saved(executor: LocalExecutor) -> None:
    """Wait until its saver has ended, with or without a file."""
    assert executor.saver is not None
    executor.saver.thread.join(WAIT_S)
    assert not executor.saver.thread.is_alive()


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, MIXTURE], ids=["llama", "tied", "mixture"]
)
@pytest.mark.parametrize("quantize", ["int8", "int8-g32", "int4", "int4-g32"])
def test_bytes_are_those_that_packing_gives(tmp_path: Path, quantize: str, changes: dict[str, Any]) -> None:
    path, cache = checkpoint(tmp_path / "model", **changes), tmp_path / "cache"
    plain = started(path, "off", quantize=quantize)
    first = started(path, cache, quantize=quantize)
    (file,) = kept(cache)
    second = started(path, cache, quantize=quantize)
    assert was_read(second)
    assert not was_read(first)
    assert packed_bytes(plain) == packed_bytes(first) == packed_bytes(second)
    assert kept(cache) == [file]


@pytest.mark.parametrize("name", ["ct-int4-g32-asym", "awq-g32", "gptq-g32", "ct-w8a8"])
def test_bytes_of_a_quantized_checkpoint(tmp_path: Path, name: str) -> None:
    write, config, _ = CASES[name]
    made, cache = make(tmp_path, write, config), tmp_path / "cache"
    expected = packed_bytes(started(made.quantized, cache))
    kept(cache)
    second = started(made.quantized, cache)
    assert was_read(second)
    assert packed_bytes(second) == expected


def test_plain_weights_are_not_kept(tmp_path: Path) -> None:
    path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
    assert started(path, cache).saver is None
    assert not cache.exists()


def quill(cache: Path | str, num_files: int = 1, **settings: Any) -> list[tuple[int, ...]]:
    llm = LLM("quill", quantize="int8", packed_cache=str(cache), num_kv_blocks=64, **settings)
    params = SamplingParams(temperature=0.8, seed=SEED, max_tokens=24)
    outputs = llm.generate(["It was a dark and", "Once"], params, use_tqdm=False)
    if cache != "off":
        kept(Path(cache), num_files)
    llm.close()
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("settings", [{}, {"max_loras": 1}], ids=["base", "adapters"])
def test_tokens_are_the_same(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "quire")
    plain = quill("off", **settings)
    first = quill(tmp_path / "cache", **settings)
    assert not [record for record in caplog.records if record.message == "packed_weights_read"]
    second = quill(tmp_path / "cache", **settings)
    assert [record for record in caplog.records if record.message == "packed_weights_read"]
    assert plain == first == second, f"seed {SEED}"


def test_each_rank_keeps_its_part(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    settings = {"num_files": 2, "tensor_parallel_size": 2, "threads": 1}
    plain = quill("off", **settings)
    first = quill(cache, **settings)
    files = {file: file.stat() for file in kept(cache, 2)}
    second = quill(cache, **settings)
    assert plain == first == second, f"seed {SEED}"
    assert all(file.stat().st_mtime_ns > before.st_mtime_ns for file, before in files.items())  # read
    assert all(file.stat().st_ino == before.st_ino for file, before in files.items())  # and not written


def change_in_place(file: Path) -> None:
    """Another sign of many weights, with the old size, inode and time."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(before.st_size // 2)
        old = opened.read(1000)
        opened.seek(before.st_size // 2)
        opened.write(bytes(byte ^ 0x80 for byte in old))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_a_checkpoint_changed_in_place_is_packed_anew(tmp_path: Path) -> None:
    path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
    before = packed_bytes(started(path, cache, quantize="int8"))
    kept(cache)
    change_in_place(path / "model.safetensors")
    expected = packed_bytes(started(path, "off", quantize="int8"))
    assert expected != before
    second = started(path, cache, quantize="int8")
    assert not was_read(second)
    assert packed_bytes(second) == expected
    kept(cache, 2)
    assert packed_bytes(started(path, cache, quantize="int8")) == expected


CHANGES: dict[str, Callable[[Path], None]] = {
    "replaced": lambda path: shutil.copy(path / "model.safetensors", path / "new")
    and (path / "new").replace(path / "model.safetensors"),
    "touched": lambda path: os.utime(path / "model.safetensors"),
    "config": lambda path: (path / "config.json").write_text((path / "config.json").read_text() + "\n"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_that_looks_changed_is_packed_anew(tmp_path: Path, change: str) -> None:
    path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
    started(path, cache, quantize="int8")
    kept(cache)
    time.sleep(0.02)  # a file system may count time in steps of 10 ms
    CHANGES[change](path)
    assert not was_read(started(path, cache, quantize="int8"))


def test_a_checkpoint_changed_before_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "QUIET_S", 1.0)
    path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
    first = started(path, cache, quantize="int8")
    change_in_place(path / "model.safetensors")
    saved(first)
    assert not list(cache.iterdir())


def test_every_setup_has_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
    levels = detect_device().levels
    setups: list[dict[str, Any]] = [
        {"quantize": "int8"}, {"quantize": "int4"}, {"quantize": "int8", "dtype": "float32"},
        {"quantize": "int8", "quantize_head": "int8-g32"},
        *({"quantize": "int8", "cpu_isa": isa} for isa in levels[:-1]),
    ]  # fmt: skip
    for number, setup in enumerate(setups, 1):
        assert not was_read(started(path, cache, **setup)), setup
        kept(cache, number)
    assert all(was_read(started(path, cache, **setup)) for setup in setups)
    monkeypatch.setattr(packed_cache, "code_digest", lambda _: "of another version")
    assert not was_read(started(path, cache, quantize="int8"))


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
    expected = packed_bytes(started(path, cache, quantize="int4"))
    (file,) = kept(cache)
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) - 4096] ^= 1  # in the last matrix: those before it are filled by then
    file.write_bytes({"flipped": bytes(flipped), "short": whole[:-1], "empty": b""}[damage])
    second = started(path, cache, quantize="int4")
    assert not was_read(second)
    assert packed_bytes(second) == expected
    assert [record.message for record in caplog.records] == ["packed_weights_not_used"]
    saved(second)
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = checkpoint(tmp_path / "model")
    expected = packed_bytes(started(path, "off", quantize="int8"))
    (tmp_path / "file").write_text("")
    executor = started(path, tmp_path / "file" / "cache", quantize="int8")
    saved(executor)
    assert packed_bytes(executor) == expected
    assert caplog.records[-1].message == "packed_weights_not_kept"


def test_a_disk_that_would_be_full_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 10))
    saved(started(path, cache, quantize="int8"))
    assert not list(cache.iterdir())
    assert "stay free" in str(caplog.records[0].__dict__["fields"]["error"])


def test_the_limit_of_the_folder_holds(tmp_path: Path) -> None:
    path, cache = checkpoint(tmp_path / "model", vocab_size=12_000), tmp_path / "cache"
    for quantize in ("int8", "int8-g32", "int8-g64"):  # of 0.8 MiB each
        saved(started(path, cache, quantize=quantize, packed_cache_mib=2))
    assert len(kept(cache)) == 2
    assert was_read(started(path, cache, quantize="int8-g64", packed_cache_mib=2))
    assert not was_read(started(path, cache, quantize="int8", packed_cache_mib=2))
    larger = checkpoint(tmp_path / "larger", vocab_size=24_000)
    assert started(larger, tmp_path / "other", quantize="int8", packed_cache_mib=1).saver is None


def test_a_saver_waits_while_steps_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "QUIET_S", 0.2)
    path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
    executor = started(path, cache, quantize="int8")
    executor.between.step_begins()
    time.sleep(0.6)
    assert not cache.exists()
    executor.between.step_ended()
    kept(cache)


def test_an_engine_that_ends_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = checkpoint(tmp_path / "model"), tmp_path / "cache"
    executor = started(path, cache, quantize="int8")
    saver = executor.saver
    assert saver is not None
    executor.close()
    assert saver.thread is not None
    assert not saver.thread.is_alive()
    assert not list(cache.glob("*.part")) if cache.exists() else True


def test_small_models_are_kept_in_a_given_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert packed_file.packed_folder() == tmp_path / "home" / "quire" / "packed"
    path = checkpoint(tmp_path / "model")
    assert started(path, "auto", quantize="int8").saver is None
    monkeypatch.setattr("quire.config.MIN_PACKED_BYTES", 1)
    saved(started(path, "auto", quantize="int8"))
    assert len(packed_file.entries(packed_file.packed_folder())) == 1


def test_a_user_without_a_home_packs_at_every_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    path = checkpoint(tmp_path / "model")
    expected = packed_bytes(started(path, "off", quantize="int8"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("quire.config.MIN_PACKED_BYTES", 0)
    monkeypatch.setattr(Path, "home", no_home)
    executor = started(path, "auto", quantize="int8")
    assert executor.saver is None
    assert packed_bytes(executor) == expected
    assert (
        packed_weights()
        == "none: Could not determine home directory. Set HOME, XDG_CACHE_HOME or --packed-cache"
    )
