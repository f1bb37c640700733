"""Import every module of the package with each extra's packages blocked, in turn and all at once; needs no pytest.

`--together` does the last alone, in a few seconds.

A module imports without any extra. Those of `quire_lab.cockpit`, which is what its extra is for, raise the ConfigError
that names it. Triton is no extra: it comes with the CUDA build of torch, and a module that needs it is counted where it
is absent.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
# Third-party packages that take long to import; loaded once, before the fork of each case.
SHARED = (
    "torch",
    "aiohttp",
    "pydantic",
    "starlette",
    "uvicorn",
    "tokenizers",
    "typer",
    "rich",
    "prompt_toolkit",
)
WINGS = {"cockpit": "quire_lab.cockpit"}  # by extra: the package that is for it alone


def modules() -> list[str]:
    """Return the names of all modules under `src`."""
    files = sorted(SOURCE.glob("quire*/**/*.py"))
    return [
        ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for file in files
    ]


def block(extras: Sequence[str]) -> None:
    """Make importing the packages of ``extras`` fail in this process."""
    from quire.extras import EXTRAS

    for extra in extras:
        for name in EXTRAS[extra].modules:
            sys.modules[name] = None  # type: ignore[assignment]


def faults(extras: Sequence[str]) -> list[str]:
    """Import every module with ``extras`` blocked, in this process; return what is wrong."""
    block(extras)
    from quire.errors import ConfigError
    from quire.extras import install_command

    wings = {WINGS[extra]: install_command(extra) for extra in extras if extra in WINGS}
    found = []
    for name in modules():
        command = next((c for wing, c in wings.items() if f"{name}.".startswith(f"{wing}.")), None)
        try:
            importlib.import_module(name)
        except ConfigError as error:
            if command is None or command not in str(error):
                found.append(f"{name}: {error}")
        except Exception as error:
            if not (isinstance(error, ModuleNotFoundError) and error.name == "triton"):
                found.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if command is not None:
                found.append(f"{name} imports without its extra: delete it from WINGS of {__file__}")
    return found


def begin_fork(work: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """Begin ``work`` in a fork of this process; return what waits for its result."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        status = 1
        try:
            with os.fdopen(write, "wb") as pipe:
                pipe.write(pickle.dumps(work()))
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)

    def result() -> list[str]:
        with os.fdopen(read, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        if status:
            return [f"the process that imports ended with status {status}"]
        found: list[str] = pickle.loads(answer)
        return found

    return result


def main() -> int:
    from quire.extras import EXTRAS

    for name in (*SHARED, *(name for extra in EXTRAS.values() for name in extra.modules)):
        with suppress(ImportError):
            importlib.import_module(name)
    gc.disable()
    cases = [[*EXTRAS]] if "--together" in sys.argv else [*([extra] for extra in EXTRAS), [*EXTRAS]]
    results = [begin_fork(partial(faults, case)) for case in cases]
    num_faults = 0
    for case, result in zip(cases, results, strict=True):
        found = result()
        num_faults += len(found)
        wrong = "".join(f"\n    {line}" for line in found)
        print(
            f"imported {len(modules())} modules without {', '.join(case)}: {len(found)} wrong{wrong}",
            flush=True,
        )
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
