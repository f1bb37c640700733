"""A root names all that the bits of KV blocks depend on: content and not the path, kernels, their arithmetic."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from tests.kernels.checks import runner_config

from quire.args import EngineArgs
from quire.config import DeviceInfo, EngineConfig
from quire.engine.kv_root import ARITHMETIC, kv_root
from quire.executor.local import LocalExecutor
from quire.kernels.registry import NATIVE_LEVELS, backends
from quire.models import content
from quire.models.checkpoint import describe
from quire.models.content import content_digest
from quire.models.hub import quill_path
from quire.request import Sampling
from quire.resolve import resolve
from quire.step import NewSeq, SeqPlan, StepPlan

GOLDEN = Path(__file__).with_name("arithmetic.json")
LEVELS = [level for level in NATIVE_LEVELS if level in backends("linear")]
FORMATS = {
    "plain": {},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4-g16"},
    "kv8": {"kv_dtype": "int8"},
    "kv4": {"kv_dtype": "int4"},
}
NUM_TOKENS, BLOCK = 48, 16


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(1000))
    return path


def test_one_file_at_two_paths_has_one_digest(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "other.safetensors"
    copy.parent.mkdir()
    shutil.copy(file, copy)
    assert content_digest([file], tmp_path / "kept") == content_digest([copy], tmp_path / "kept")


@pytest.mark.parametrize("place", [0, 499, 999])
def test_each_byte_of_each_file_counts(file: Path, tmp_path: Path, place: int) -> None:
    before = content_digest([file], tmp_path / "kept")
    facts, data = file.stat(), bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))  # as a program that hides the change
    assert content_digest([file], tmp_path / "kept") != before
    assert content_digest([file, file], tmp_path / "kept") != content_digest([file], tmp_path / "kept")


def test_pieces_of_a_large_file_count_each(file: Path, tmp_path: Path) -> None:
    before = content_digest([file], tmp_path / "kept", piece_bytes=64)
    data = file.read_bytes()
    file.write_bytes(data[64:128] + data[:64] + data[128:])
    assert content_digest([file], tmp_path / "kept", piece_bytes=64) != before


def test_a_digest_is_computed_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = content_digest([file], tmp_path / "kept")
    monkeypatch.setattr(content, "_computed", lambda *_: pytest.fail("it was read again"))
    assert content_digest([file], tmp_path / "kept") == first


def test_a_broken_kept_digest_is_computed_again(file: Path, tmp_path: Path) -> None:
    first = content_digest([file], tmp_path / "kept")
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    for wrong in ("", "{", "[]", '{"facts": 1}'):
        kept.write_text(wrong)
        assert content_digest([file], tmp_path / "kept") == first


def quill_config(**settings: object) -> EngineConfig:
    device = DeviceInfo(
        "cpu", "Some CPU (2 cores)", 2, 2**33, 2**32, isa=LEVELS[-1] if LEVELS else "scalar", native=True
    )
    checkpoint = describe(quill_path("quill"))
    args = EngineArgs(model="quill", num_kv_blocks=64, max_model_len=512, **settings)  # type: ignore[arg-type]
    return resolve(args, checkpoint.spec, device, path=str(checkpoint.path), stored=checkpoint.formats)


CHANGES: dict[str, Callable[[EngineConfig], EngineConfig]] = {
    "level": lambda c: replace(c, runner=runner_config("scalar")),
    "reference": lambda c: replace(c, runner=runner_config("reference")),
    "dtype": lambda c: replace(c, model=replace(c.model, dtype="float32")),
    "KV dtype": lambda c: replace(c, model=replace(c.model, kv_dtype="int8")),
    "context": lambda c: replace(c, model=replace(c.model, max_model_len=256)),
    "block size": lambda c: replace(c, cache=replace(c.cache, block_size=32)),
    "ranks": lambda c: replace(c, topology=replace(c.topology, tp=2)),
    "format": lambda c: replace(c, model=quill_config(quantize="int8").model),
    "processor": lambda c: replace(c, device=replace(c.device, name="Other CPU (2 cores)")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_changes_bits_changes_the_root(change: Callable[[EngineConfig], EngineConfig]) -> None:
    config = replace(quill_config(), runner=runner_config("avx2"))
    assert kv_root(change(config), "content") != kv_root(config, "content")


def test_what_changes_no_bits_does_not_change_the_root() -> None:
    config = quill_config()
    elsewhere = replace(config.model, path="/elsewhere", name="other", tokenizer="/there")
    other = replace(
        config,
        model=elsewhere,
        runner=replace(config.runner, num_threads=7, step_log="log"),
        cache=replace(config.cache, num_blocks=7),
        device=replace(config.device, name="Some CPU (64 cores)", num_cores=64),
    )
    assert kv_root(other, "content") == kv_root(config, "content")
    assert kv_root(config, "another content") != kv_root(config, "content")


def bits_of(config: EngineConfig) -> str:
    """Return a digest of the KV blocks of a prompt, computed in two chunks."""
    executor = LocalExecutor(config)
    ids = tuple(range(3, 3 + NUM_TOKENS))
    new = NewSeq(0, 0, ids, (), Sampling(max_tokens=4, seed=0), 0)
    for step, (start, end) in enumerate([(0, 20), (20, NUM_TOKENS)]):
        blocks = ((0,), (tuple(range(NUM_TOKENS // BLOCK + 1)),)) if step == 0 else ((), ())
        executor.submit(
            StepPlan(step, (new,) if step == 0 else (), (SeqPlan(0, 0, start, end - start, *blocks),))
        )
        assert executor.collect().seqs[0].error is None
    storage = executor.worker.runner.kv.storage
    return blake2b(
        storage[: NUM_TOKENS // BLOCK].view(torch.uint8).numpy().tobytes(), digest_size=16
    ).hexdigest()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("level", LEVELS)
def test_bits_change_only_with_the_version_of_the_arithmetic(level: str, kind: str) -> None:
    """After a change of the bits, raise `ARITHMETIC` and write the golden digests anew: QUIRE_GOLDEN=1 does it."""
    bits = bits_of(replace(quill_config(**FORMATS[kind]), runner=runner_config(level)))
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    known = golden.setdefault(ARITHMETIC, {})
    if os.environ.get("QUIRE_GOLDEN"):
        known[f"{level} {kind}"] = bits
        GOLDEN.write_text(json.dumps({ARITHMETIC: known}, indent=1) + "\n")
    elif f"{level} {kind}" not in known:
        pytest.skip("no golden digest for this level")
    assert bits == known[f"{level} {kind}"], "the bits have changed: raise ARITHMETIC of quire.engine.kv_root"
