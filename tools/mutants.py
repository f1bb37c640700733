"""Plant faults and demand that the suite catches each: `python tools/mutants.py [--only NAME …] [--jobs N]`.

Every mutant is a small change of one file, applied in a scratch copy of the tree. Its text must occur there exactly as
often as the table says; if it does not, the table is out of date and the run fails. A mutant of csrc is compiled, and
the copy gets its library, with emulated tiles if the mutant is one of the amx level and the CPU has no AMX. Without a
compiler, or the AVX-512 that emulated tiles need, such mutants are not tried, and the run says so and fails. Then the
named tests run against the copy: they must pass on the tree as it is and fail on the mutant. A run without an end
catches nothing, unless the table says that the mutant hangs. Exit status 0: every mutant was caught.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.util
import os
import py_compile
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutant import Mutant
from mutant_build import BuildError, NativeTree, missing_tools
from mutant_table import MUTANTS

from quire.device import is_built

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "pyproject.toml")
# An editable install redirects `import quire` to the real tree, whatever sys.path says; the copy must be what runs, in
# the servers that tests start too: every interpreter with the copy on its path runs this file when it starts.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "_editable_" not in type(finder).__module__]
import quire
assert quire.__file__.startswith({folder!r}), quire.__file__
"""
PASSED, FAILED = 0, 1  # pytest's exit codes; every other one is an error of the set-up
AT_ONCE = 25  # files whose named tests run in one process on the tree as it is
NO_END = "no end"  # beside them: the run took too long
# A fault in C++ may end the process instead of failing a test.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
OF_PYTEST_TIMEOUT = re.compile(r"Timeout \(>|\+ Timeout \+")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant, or (``mutant`` None) of the tree as it is under ``tests``."""

    mutant: Mutant | None
    tests: tuple[str, ...]
    # "caught", "SURVIVED", "NO END", "ERROR", "NOT TRIED" (see `obstacle`), or "passes" (the tree as it is)
    verdict: str
    detail: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.verdict in ("caught", "passes")


class ScratchTree:
    """A copy of the tree to spoil. ``native``: of csrc, where faults are planted there too."""

    def __init__(self, folder: Path, native: NativeTree | None, timeout_s: float) -> None:
        self.folder = folder
        self._native = native
        self._timeout_s = timeout_s
        ignore = shutil.ignore_patterns("__pycache__", "*.safetensors", "_native*.so")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignore)
            else:
                shutil.copy2(source, folder / name)
        for file in (ROOT / "src").rglob("*.safetensors"):  # the weights that ship are not copied
            (folder / file.relative_to(ROOT)).symlink_to(file)
        # The tests must meet the kernels that users have, or, beside faults in them, those of csrc as it is.
        installed = importlib.util.find_spec("quire._native")
        self._library = (
            native.plain if native else Path(installed.origin) if installed and installed.origin else None
        )
        self._place(self._library)
        (folder / "src" / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))
        # By hash and not by time: a mutant may come and go within a second and leave the file as long as it was.
        by_hash = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "src", quiet=2, invalidation_mode=by_hash)

    def _place(self, library: Path | None) -> None:
        """Put this library beside the package. A new file: a process may still have the old one mapped."""
        if library is not None:
            target = self.folder / "src" / "quire" / library.name
            target.unlink(missing_ok=True)
            shutil.copy2(library, target)

    def run(self, tests: Sequence[str], timeout_s: float | None = None) -> tuple[int | str, str]:
        """Run pytest in the copy until the first failure; return its exit code, or `NO_END`, and its output.

        ``timeout_s``: in place of the tree's own limit.
        """
        timeout_s = timeout_s or self._timeout_s
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", f"--rootdir={self.folder}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the servers of its tests, too
            process.communicate()
            return NO_END, f"no end after {timeout_s:.0f} s"
        if process.returncode == FAILED and OF_PYTEST_TIMEOUT.search(output):
            return NO_END, f"{first_failure(output)} had no end within its limit"
        return process.returncode, output

    def try_mutant(self, mutant: Mutant) -> Outcome:
        path = (ROOT if mutant.is_native else self.folder) / mutant.file
        started = time.monotonic()
        original = path.read_text() if path.exists() else ""
        count = original.count(mutant.old)
        if count != mutant.count:
            detail = f"its text occurs {count} times in {mutant.file}, not {mutant.count}: bring the table up to date"
            return Outcome(mutant, mutant.tests, "ERROR", detail, 0.0)
        if missing := obstacle(mutant, self._native):
            return Outcome(mutant, mutant.tests, "NOT TRIED", missing, 0.0)
        if mutant.is_native:
            assert self._native is not None
            try:
                self._place(self._native.library(mutant))
                code, output = self.run(mutant.tests)
            except BuildError as error:
                return Outcome(mutant, mutant.tests, "ERROR", str(error), time.monotonic() - started)
            finally:
                self._place(self._library)
        else:
            path.write_text(original.replace(mutant.old, mutant.new))
            try:
                code, output = self.run(mutant.tests)
            finally:
                path.write_text(original)
        verdict, detail = verdict_of(mutant, code, output)
        return Outcome(mutant, mutant.tests, verdict, detail, time.monotonic() - started)

    def try_as_it_is(self, tests: tuple[str, ...], on_tiles: bool) -> Outcome:
        """Run the tests of several mutants at once on the tree as it is: a process per selection would cost as much
        as the mutants themselves."""
        started = time.monotonic()
        if on_tiles:
            assert self._native is not None
            self._place(self._native.tiles)
        code, output = self.run(tests, self._timeout_s * AT_ONCE)
        if on_tiles:
            self._place(self._library)
        verdict = "passes" if code == PASSED else "ERROR"
        detail = (
            "" if code == PASSED else f"the tree as it is fails: {first_failure(output)}\n{output[-600:]}"
        )
        return Outcome(None, tests, verdict, detail, time.monotonic() - started)


def obstacle(mutant: Mutant, native: NativeTree | None) -> str | None:
    """Return why the mutant cannot be tried on this machine."""
    if mutant.is_native and native is None:
        return "there is no C++ compiler"
    if mutant.is_on_tiles and not (is_built("amx") or is_built("avx512")):
        return "this CPU has neither AMX nor the AVX-512 with BF16 that emulated tiles need"
    return None


def verdict_of(mutant: Mutant, code: int | str, output: str) -> tuple[str, str]:
    """Return the verdict on a mutant, and its reason, by what became of its tests."""
    if code == PASSED:
        return "SURVIVED", "every named test passed"
    if code == NO_END:
        return ("caught" if mutant.hangs else "NO END"), output
    if code == FAILED:
        return "caught", first_failure(output)
    if mutant.is_native and isinstance(code, int) and -code in CRASHES:
        return "caught", f"the tests' process died of {signal.Signals(-code).name}"
    return "ERROR", f"pytest exit code {code}: {output[-600:]}"


def first_failure(output: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+|\(.*\))", output, re.MULTILINE)
    return found.group(1) if found else output[-200:].strip()


def as_it_is(mutants: Sequence[Mutant]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Yield which tests to run on the tree as it is, each once, and whether on emulated tiles."""
    for on_tiles in (False, True):
        by_file: dict[str, set[str]] = {}
        for tests in sorted({m.tests for m in mutants if m.is_on_tiles == on_tiles}):
            if any(test.startswith("-") for test in tests):  # an option holds for all tests of its run
                yield tests, on_tiles
                continue
            for test in tests:
                by_file.setdefault(test.partition("::")[0], set()).add(test)
        for files in batched(sorted(by_file), AT_ONCE):
            yield tuple(sorted(test for file in files for test in by_file[file])), on_tiles


def batched(items: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def run_all(
    mutants: Sequence[Mutant], jobs: int, timeout_s: float, native: NativeTree | None
) -> list[Outcome]:
    """Try the tree as it is under every selection of tests, and every mutant; ``jobs`` copies work side by side."""
    work: queue.SimpleQueue[Mutant | tuple[tuple[str, ...], bool]] = queue.SimpleQueue()
    for selection in as_it_is([m for m in mutants if obstacle(m, native) is None]):
        work.put(selection)
    for mutant in mutants:
        work.put(mutant)
    outcomes: list[Outcome] = []

    def worker() -> None:
        with tempfile.TemporaryDirectory(prefix="quire-mutants-") as folder:
            tree = ScratchTree(Path(folder), native, timeout_s)
            while True:
                try:
                    item = work.get_nowait()
                except queue.Empty:
                    return
                outcome = tree.try_mutant(item) if isinstance(item, Mutant) else tree.try_as_it_is(*item)
                name = outcome.mutant.name if outcome.mutant else "(tree as it is)"
                print(f"{outcome.verdict:9} {outcome.seconds:5.1f} s  {name}", flush=True)
                outcomes.append(outcome)

    threads = [threading.Thread(target=worker) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def print_table(outcomes: Sequence[Outcome]) -> None:
    rows = sorted((o for o in outcomes if o.mutant), key=lambda o: MUTANTS.index(o.mutant))  # type: ignore[arg-type]
    print("\n| fault | caught by |\n|---|---|")
    for outcome in rows:
        assert outcome.mutant is not None
        caught = outcome.detail if outcome.good else f"**{outcome.verdict}** {outcome.detail}"
        print(f"| {outcome.mutant.fault} | {caught} |")
    for outcome in outcomes:
        if outcome.mutant is None and not outcome.good:
            print(f"\n{' '.join(outcome.tests)}: {outcome.detail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of mutants", choices=[m.name for m in MUTANTS])
    parser.add_argument("--python-only", action="store_true", help="no faults in csrc, which need a compiler")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="scratch copies at work"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=240, help="seconds until a run counts as one without end"
    )
    parser.add_argument("--list", action="store_true", help="list the mutants and exit")
    args = parser.parse_args()
    if args.list:
        for mutant in MUTANTS:
            print(f"{mutant.name:34} {mutant.fault}")
        return 0
    chosen = [m for m in MUTANTS if not args.only or m.name in args.only]
    chosen = [m for m in chosen if not (args.python_only and m.is_native)]
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        native = None
        if (num_native := sum(m.is_native for m in chosen)) and (lacking := missing_tools()):
            print(f"{num_native} faults in csrc are not tried, for want of {', '.join(lacking)}", flush=True)
        elif num_native:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-mutants-csrc-"))
            emulate = any(m.is_on_tiles for m in chosen) and not is_built("amx") and is_built("avx512")
            native = NativeTree(Path(folder), emulate=emulate)
            print(f"csrc built in {time.monotonic() - started:.0f} s", flush=True)
        outcomes = run_all(chosen, args.jobs, args.timeout_s, native)
    print_table(outcomes)
    bad = [o for o in outcomes if not o.good]
    counts = Counter(o.verdict for o in outcomes if o.mutant)
    others = "".join(
        f", {count} {verdict}" for verdict, count in sorted(counts.items()) if verdict != "caught"
    )
    print(
        f"\n{counts['caught']} of {len(chosen)} mutants caught{others}, in {time.monotonic() - started:.0f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
