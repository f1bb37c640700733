"""Plant faults and demand that the suite catches each: `python tools/mutants.py [--only NAME …] [--jobs N]`.

Every mutant is a small change of one file, applied in a scratch copy of the tree. Its text must occur there exactly as
often as the table says; if it does not, the table is out of date and the run fails. Then the named tests run against
the copy: they must pass on the tree as it is and fail on the mutant. Exit status 0: every mutant was caught.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutant_table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "pyproject.toml")
TIMEOUT_S = 240
# An editable install redirects `import quire` to the real tree, whatever sys.path says; the copy must be what runs, in
# the servers that tests start too: every interpreter with the copy on its path runs this file when it starts.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "_editable_" not in type(finder).__module__]
import quire
assert quire.__file__.startswith({folder!r}), quire.__file__
"""
PASSED, FAILED = 0, 1  # pytest's exit codes; every other one is an error of the set-up


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant, or (``mutant`` None) of the tree as it is under ``tests``."""

    mutant: Mutant | None
    tests: tuple[str, ...]
    verdict: str  # "caught", "SURVIVED", "ERROR" or "passes" (the tree as it is)
    detail: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.verdict in ("caught", "passes")


class ScratchTree:
    """A copy of the tree to spoil."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=ignore)
            else:
                shutil.copy2(source, folder / name)
        for file in (ROOT / "src").rglob("*.safetensors"):  # the weights that ship are not copied
            (folder / file.relative_to(ROOT)).symlink_to(file)
        native = importlib.util.find_spec("quire._native")
        if native is not None and native.origin:  # the tests must meet the kernels that users have
            shutil.copy2(native.origin, folder / "src" / "quire")
        (folder / "src" / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))

    def run(self, tests: Sequence[str]) -> tuple[int, str]:
        """Run pytest in the copy until the first failure; return its exit code and output."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", f"--rootdir={self.folder}"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return FAILED, f"FAILED (no end after {TIMEOUT_S} s)"
        return done.returncode, done.stdout + done.stderr

    def try_mutant(self, mutant: Mutant) -> Outcome:
        path = self.folder / mutant.file
        started = time.monotonic()
        original = path.read_text() if path.exists() else ""
        count = original.count(mutant.old)
        if count != mutant.count:
            detail = f"its text occurs {count} times in {mutant.file}, not {mutant.count}: bring the table up to date"
            return Outcome(mutant, mutant.tests, "ERROR", detail, 0.0)
        path.write_text(original.replace(mutant.old, mutant.new))
        try:
            code, output = self.run(mutant.tests)
        finally:
            path.write_text(original)
        seconds = time.monotonic() - started
        if code == PASSED:
            return Outcome(mutant, mutant.tests, "SURVIVED", "every named test passed", seconds)
        if code == FAILED:
            return Outcome(mutant, mutant.tests, "caught", first_failure(output), seconds)
        return Outcome(mutant, mutant.tests, "ERROR", f"pytest exit code {code}: {output[-600:]}", seconds)

    def try_as_it_is(self, tests: tuple[str, ...]) -> Outcome:
        started = time.monotonic()
        code, output = self.run(tests)
        verdict = "passes" if code == PASSED else "ERROR"
        detail = (
            "" if code == PASSED else f"the tree as it is fails: {first_failure(output)}\n{output[-600:]}"
        )
        return Outcome(None, tests, verdict, detail, time.monotonic() - started)


def first_failure(output: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+|\(.*\))", output, re.MULTILINE)
    return found.group(1) if found else output[-200:].strip()


def run_all(mutants: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Try the tree as it is under every selection of tests, and every mutant; ``jobs`` copies work side by side."""
    work: queue.SimpleQueue[Mutant | tuple[str, ...]] = queue.SimpleQueue()
    for tests in sorted({m.tests for m in mutants}):
        work.put(tests)
    for mutant in mutants:
        work.put(mutant)
    outcomes: list[Outcome] = []

    def worker() -> None:
        with tempfile.TemporaryDirectory(prefix="quire-mutants-") as folder:
            tree = ScratchTree(Path(folder))
            while True:
                try:
                    item = work.get_nowait()
                except queue.Empty:
                    return
                outcome = tree.try_mutant(item) if isinstance(item, Mutant) else tree.try_as_it_is(item)
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
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="scratch copies at work"
    )
    parser.add_argument("--list", action="store_true", help="list the mutants and exit")
    args = parser.parse_args()
    if args.list:
        for mutant in MUTANTS:
            print(f"{mutant.name:28} {mutant.fault}")
        return 0
    chosen = [m for m in MUTANTS if not args.only or m.name in args.only]
    started = time.monotonic()
    outcomes = run_all(chosen, args.jobs)
    print_table(outcomes)
    bad = [o for o in outcomes if not o.good]
    caught = sum(o.verdict == "caught" for o in outcomes)
    print(f"\n{caught} of {len(chosen)} mutants caught in {time.monotonic() - started:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
