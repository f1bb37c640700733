"""The commands as a person runs them: each in a process of its own, on Quill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from quire.cli.doctor import advice, kernels, packed_weights, reasons
from quire.cli.terminal import Conversation
from quire.cores import withheld_cores
from quire.device import unused_levels
from quire.models.hub import quill_path

SMALL = ["--num-kv-blocks", "64", "--max-model-len", "512"]


def quire(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire.cli", *arguments],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src")},
    )


def test_run_continues_a_text_and_repeats_itself_with_a_seed() -> None:
    command = ["run", "quill", "It was a dark and", "--max-tokens", "8", "--sample-seed", "5", *SMALL]
    first, second = quire(*command), quire(command[0], *command[2:])  # a text alone is for Quill
    assert first.returncode == 0, first.stderr
    assert first.stdout.strip()
    assert first.stdout == second.stdout


def test_chat_answers_each_line_and_takes_commands(tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    done = quire(
        "chat", "--max-tokens", "6", *SMALL, text=f"Hello.\n/undo\nGood day.\n/save {saved}\n/exit\n"
    )
    assert done.returncode == 0, done.stderr
    assert "taken back" in done.stdout
    assert '"Good day."' in saved.read_text()
    assert '"Hello."' not in saved.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "/no/such/model", "x"], "there is no file or folder '/no/such/model'"),
        (["run", "quil", "x"], "did you mean 'quill'"),
        (["run", "quill", "x", "--gate", "ajar"], "gate = 'ajar' must be one of static, dynamic, continuous"),
        (["run", "quill", "x", "--kv-memory", "lots"], "kv_memory = 'lots' is not a size"),
        (["run", "quill", "x", "--kv-memory", "3"], "kv_memory = '3' is less than two blocks of 16 tokens"),
        (["plan", "org/model", "--gpu", "h1000"], "--gpu 'h1000' is not in the hardware table"),
        (["run", "quill", "x", "--max-model-len", "9999999"], "more than the model's 8192 positions"),
        (["serve", "quill", "--config", "/no/such.toml"], "cannot be read"),
    ],
)
def test_a_wrong_word_is_one_line_and_status_1(arguments: list[str], message: str) -> None:
    done = quire(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("quire: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_doctor_reports_this_machine() -> None:
    done = quire("doctor")
    assert done.returncode == 0, done.stderr
    for word in ("CPU", "Kernels", "Memory", "torch"):
        assert word in done.stdout


def test_doctor_says_what_to_do_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.device._native", None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert any("no C++ compiler was found" in sentence for sentence in advice())
    assert "torch reference" in kernels()


BF16 = {"avx2": True, "avx512": True, "avx512_vnni": True, "avx512_bf16": True}


@pytest.mark.parametrize(
    ("features", "best", "flags", "said"),
    [
        (BF16, "avx512", set(), ["amx is not used: this CPU, or the virtual machine's view of it, has no amx_tile"]),
        (BF16, "avx512", {"amx_tile"}, ["the CPU has amx_tile, and the operating system does not let processes"]),
        ({**BF16, "amx_tile": True, "amx_int8": True, "amx_bf16": True}, "avx512", set(), ["this build has no such"]),
        (
            {"avx2": True, "avx512": True}, "avx512_bw", set(),
            ["no avx512_vnni, avx512_bf16, amx_tile", "avx512_bf16", "avx512_vnni is not used: this CPU"],
        ),
        ({"avx2": True}, "avx2", {"avx512bw"}, ["the CPU has avx512, and the operating"] * 4),
        ({"neon": True, "neon_dotprod": True}, "neon", set(), ["neon_i8mm is not used: this CPU"]),
        ({"neon": True}, "scalar", {"asimddp"}, ["neon_i8mm is not used: the CPU", "neon is not used: the CPU"]),
    ],
)  # fmt: skip
def test_doctor_says_why_a_level_is_not_used(
    features: dict[str, bool], best: str, flags: set[str], said: list[str]
) -> None:
    found = unused_levels(features, best, lambda level: level == best, flags)
    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert part in sentence


def test_doctor_says_why_cores_are_withheld(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4096)
    assert any("The affinity of this process" in sentence for sentence in reasons())
    monkeypatch.setattr("quire.cores.usable_cpus", lambda: set(range(4096)))
    monkeypatch.setattr("quire.cores._read", lambda path: "150000 100000" if "cpu.max" in path else "")
    assert withheld_cores() == "The cgroup's quota (cpu.max) leaves 1.5 of 4096 CPUs."


def test_doctor_says_what_is_kept_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "quire" / "packed"
    assert packed_weights() == f"0 files, 0.0 GiB in {folder} (--packed-cache)"
    folder.mkdir(parents=True)
    with (folder / "key.packed").open("wb") as file:
        file.truncate(3 << 30)
    assert packed_weights() == f"1 file, 3.0 GiB in {folder} (--packed-cache)"


def test_doctor_checks_a_model(tmp_path: Path) -> None:
    fine = quire("doctor", "--check", "quill")
    assert fine.returncode == 0, fine.stderr
    assert "all are finite" in fine.stdout
    source = quill_path("quill")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    name = sorted(tensors)[3]
    tensors[name].view(-1)[5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    broken = quire("doctor", "--check", str(tmp_path))
    assert broken.returncode == 1
    assert f"{name} in {tmp_path}" in broken.stdout
    assert "1 NaN and 0 infinite" in broken.stdout
    tensors[name] = tensors[name][..., :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    cut = quire("doctor", "--check", str(tmp_path))
    assert cut.returncode == 1
    assert f"{name} has shape" in cut.stderr


def test_undo_takes_back_a_whole_exchange() -> None:
    talk = Conversation(
        "Be brief.", [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    assert talk.undo() == "a"
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    assert talk.undo() is None
