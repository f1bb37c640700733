"""`quire.LLM` with a tier: the last prompt of a program is stored while it ends, closed or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, SamplingParams

PROGRAM = """
import sys
from quire import LLM, SamplingParams

llm = LLM("quill", kv_disk=sys.argv[1] + ":64MiB", threads=1)
(output,) = llm.generate([list(range(5, 105))], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
stats = llm.client.stats()
print(output.outputs[0].token_ids, stats.num_loaded_blocks, stats.num_failed_transfers)
"""


def run(folder: Path, end: str) -> str:
    """Return the token ids of a program's answer, which finds no block in the folder."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + end, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    ids, num_loaded, num_failed = done.stdout.splitlines()[-1].rsplit(" ", 2)
    assert (num_loaded, num_failed) == ("0", "0")
    return ids


@pytest.mark.parametrize("end", ["", "llm.close()"])
def test_last_prompt_of_a_program_is_stored(tmp_path: Path, end: str) -> None:
    first = run(tmp_path / "kv", end)
    llm = LLM("quill", kv_disk=f"{tmp_path / 'kv'}:64MiB", threads=1)
    params = SamplingParams(max_tokens=2, temperature=0)
    (output,) = llm.generate([list(range(5, 105))], params, use_tqdm=False)
    stats = llm.client.stats()
    llm.close()
    assert (stats.num_loaded_blocks > 0, stats.num_failed_transfers) == (True, 0)
    assert str(output.outputs[0].token_ids) == first
