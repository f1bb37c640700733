"""Write the lock files of the release image from constraints.txt: `make lock`, after a version there has changed.

constraints.txt has the version of every package that users and developers get, without hashes, since pip refuses an
editable install beside hashes. The image is built from three lock files with the hashes of all files of each release:

    deploy/requirements.lock    what Quire needs to run, with the extras of the image, less torch
    deploy/build.lock           what builds it
    deploy/torch.lock           torch, from PyTorch's index of builds for CPUs; written by hand
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("redis", "postgres", "otel", "cockpit", "zstd")  # of the image
HEAD = "# Written by `make lock` from constraints.txt: do not edit.\n"
PYTHON = "3.11.16"  # of the image
TORCH = "https://download.pytorch.org/whl/cpu/torch/"


def constraints() -> dict[str, str]:
    """Return version by name, in lower case with hyphens."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(pinned(line) for line in lines if line and not line.startswith("#"))


def pinned(line: str) -> tuple[str, str]:
    """Return the name, in lower case with hyphens, and the version of a line ``name==version``."""
    name, _, version = line.partition("==")
    return re.sub(r"[-_.]+", "-", name).lower(), version.split(";")[0].split(" ")[0].strip()


def locked(name: str) -> dict[str, str]:
    """Return version by name of a lock file in `deploy`."""
    lines = (ROOT / "deploy" / name).read_text().splitlines()
    return dict(pinned(line.removesuffix(" \\")) for line in lines if line and line[0] not in " #-")


def compiled(requirements: Path, *arguments: str) -> str:
    """Return what `uv pip compile` resolves, with hashes."""
    command = ["uv", "pip", "compile", str(requirements), "--generate-hashes", "--no-header", "--no-annotate",
               "--quiet", "--python-version", PYTHON, "--python-platform", "x86_64-manylinux_2_28",
               "--no-emit-package", "torch", *arguments]  # fmt: skip
    return HEAD + subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def main() -> None:
    torch = locked("torch.lock")["torch"]
    version = constraints()["torch"]
    if torch != f"{version}+cpu":
        raise SystemExit(
            f"deploy/torch.lock has torch {torch}, constraints.txt {version}: write the version and the hashes of "
            f"{TORCH} (cp311, manylinux) into it first."
        )
    with tempfile.TemporaryDirectory() as folder:
        # The build for CPUs, which uv looks for at PyTorch's index: the one of PyPI names packages of CUDA.
        pins = Path(folder) / "constraints.txt"
        pins.write_text(
            "".join(f"{name}=={version}\n" for name, version in (constraints() | {"torch": torch}).items())
        )
        build = Path(folder) / "build.in"
        build.write_text(
            "\n".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"])
        )
        extras = [word for extra in EXTRAS for word in ("--extra", extra)]
        index = ["--constraint", str(pins), *(sys.argv[1:] or ["--find-links", TORCH])]
        runtime = compiled(ROOT / "pyproject.toml", *extras, *index)
        (ROOT / "deploy" / "requirements.lock").write_text(runtime)
        (ROOT / "deploy" / "build.lock").write_text(compiled(build, *index))


if __name__ == "__main__":
    main()
