"""`quire.LLM` with a tier: the last prompt of a program is stored while it ends, closed or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from quire import LLM, SamplingParams

llm = LLM("quill", kv_disk=sys.argv[1] + ":64MiB", threads=1)
(output,) = llm.generate([list(range(5, 105))], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
stats = llm.client.stats()
print(output.outputs[0].token_ids, stats.num_loaded_blocks, stats.num_failed_transfers)
"""


def run(folder: Path, end: str = "") -> tuple[str, int]:
    """Return the answer's token ids and the number of blocks that were loaded."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + end, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    ids, num_loaded, num_failed = done.stdout.splitlines()[-1].rsplit(" ", 2)
    assert int(num_failed) == 0
    return ids, int(num_loaded)


@pytest.mark.parametrize("end", ["", "llm.close()"])
def test_last_prompt_of_a_program_is_stored(tmp_path: Path, end: str) -> None:
    first, num_loaded = run(tmp_path / "kv", end)
    assert num_loaded == 0
    again, num_loaded = run(tmp_path / "kv", end)
    assert num_loaded > 0
    assert again == first
