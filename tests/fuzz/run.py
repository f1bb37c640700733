"""Coverage-guided fuzzing (atheris, libFuzzer): ``python -m tests.fuzz.run [--only NAME …] [--seconds 60] [--report]``.

Each target of `tests.fuzz.targets` runs in a process of its own, from its corpus. What raises something else than a
clear refusal, or takes longer than five seconds, is printed and written to ``tests/fuzz/found/TARGET``; its smallest
form belongs into ``tests/fuzz/corpus/TARGET`` once the bug is mended. Exit status 1 where anything was found.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType

from tests.faults.report import table, write_section
from tests.fuzz import NAMES

FOUND = Path(__file__).with_name("found")
LIMIT_S = 5
# Where a process may write its files: in memory, if it can be. libFuzzer ends the process, so it cannot tidy up itself.
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
START_S = 900  # of a process that instruments what it imports, on a machine that others load


class Slow(BaseException):
    """A run that does not end."""


def fuzz_one(name: str, seconds: int) -> None:
    """Fuzz one target in this process; libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=["quire", "python_multipart", "starlette.formparsers"]):
        from tests.fuzz.seeds import seeds_of  # no module of quire may be imported before this block
        from tests.fuzz.targets import ALLOWED, TARGETS

    target, seen = TARGETS[name](Path(tempfile.mkdtemp())), set()

    def late(number: int, frame: FrameType | None) -> None:
        raise Slow(f"longer than {LIMIT_S} s")

    def once(data: bytes) -> None:
        signal.alarm(LIMIT_S)
        try:
            target(data)
        except ALLOWED:
            return
        except (Exception, Slow) as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            key = (type(error), at.filename, at.lineno)
            if key not in seen:
                seen.add(key)
                folder = FOUND / name
                folder.mkdir(parents=True, exist_ok=True)
                (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
                print(f"FOUND {name}: {error!r:.300} at {at.filename}:{at.lineno}: {data!r:.200}", flush=True)
        finally:
            signal.alarm(0)

    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as folder:
        for i, seed in enumerate(seeds_of(name)):
            (Path(folder) / f"seed-{i}").write_bytes(seed)
        words = {word for seed in seeds_of(name) for word in re.findall(rb"[A-Za-z_.-]{3,40}", seed)}
        lines = b"".join(b'"%s"\n' % word for word in sorted(words))
        (Path(folder) / "words").write_bytes(lines)
        options = [f"-dict={folder}/words", f"-max_total_time={seconds}", "-timeout=60", "-rss_limit_mb=4096",
                   "-max_len=8192", "-print_final_stats=1", f"-artifact_prefix={FOUND}/"]  # fmt: skip
        atheris.Setup([sys.argv[0], folder, *options], once)
        atheris.Fuzz()


def run_one(name: str, seconds: int) -> tuple[str, ...]:
    """Fuzz one target in a process; return its row of the table."""
    FOUND.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="quire-fuzz-", dir=SCRATCH) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.run", "--one", name, "--seconds", str(seconds)],
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=seconds * 3 + START_S,
            check=False,
        )
    text = done.stdout + done.stderr
    found = [line for line in text.splitlines() if line.startswith("FOUND")]
    for line in found:
        print(line, flush=True)
    units = re.search(r"stat::number_of_executed_units:\s*(\d+)", text)
    coverage = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", text)
    if units is None:
        print(text[-2000:])
        return name, "died", "-", "-", str(len(found) + 1)
    cov, _, corpus = coverage[-1] if coverage else ("-", "-", "-")
    return name, f"{int(units[1]):,}", cov, corpus, str(len(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="*", choices=NAMES)
    parser.add_argument("--one", choices=NAMES, help="fuzz this target in this process")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument(
        "--report", action="store_true", help="write the table to benchmarks/results/faults.md"
    )
    args = parser.parse_args()
    if args.one:
        fuzz_one(args.one, args.seconds)
        return 0
    rows = []
    for name in args.only or NAMES:
        rows.append(run_one(name, args.seconds))
        print(rows[-1], flush=True)
    head = ("target", "executions", "edges covered", "inputs kept", "bugs found")
    text = f"atheris (libFuzzer), {args.seconds} s per target.\n\n{table(head, rows)}"
    print(text)
    if args.report:
        write_section("Coverage-guided fuzzing of readers", "make fuzz-files", text)
    return 1 if any(row[-1] != "0" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
