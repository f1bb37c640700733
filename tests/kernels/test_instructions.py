"""Each level's objects hold the instructions that the level is for, and none that it may not use.

Looks at the objects of a build tree below ``build/`` (the installed extension has no names for its levels left).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OBJDUMP = shutil.which("objdump")


@cache
def disassembly(level: str, source: str) -> str:
    """The instructions of one source at one level, as objdump prints them; skips where there are none to look at."""
    if OBJDUMP is None:
        pytest.skip("objdump is not installed")
    found = ROOT.glob(f"build/**/kernels_{level}.dir/**/{source}.cpp.o")
    others = {ROOT / "build" / name for name in ("arm", "amx", "asan")}  # of `make test-arm` and so on
    here = [each for each in found if others.isdisjoint(each.parents)]
    objects = sorted(here, key=lambda o: o.stat().st_mtime)
    if not objects:
        pytest.skip(f"no object of {source} at level {level} below build/")
    command = [OBJDUMP, "-d", "--no-show-raw-insn", str(objects[-1])]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("level", "source", "instruction"),
    [
        ("amx", "linear_amx", "tdpbf16ps"),
        ("amx", "linear_amx", "tileloaddt1"),
        ("amx", "quantized_amx", "tdpbsud"),
        ("amx", "quantized_amx", "tdpbssd"),
        ("avx512", "linear_kernel", "vdpbf16ps"),
        ("avx512", "quantized_kernel", "vpdpbusd"),
        ("avx512_vnni", "attention_tiles_kernel", r"vpdpwssd .*%zmm\d+"),
        ("avx512_vnni", "quantized_kernel", r"vpdpbusd .*%zmm\d+"),
        ("avx512_bw", "linear_kernel", r"vfmadd231ps .*%zmm\d+"),
        ("avx512_bw", "quantized_kernel", r"vpmaddubsw .*%zmm\d+"),
        ("avx512_bw", "attention_tiles_kernel", r"vpmaddwd .*%zmm\d+"),
        ("avx2", "linear_kernel", "vfmadd231ps"),
        ("avx2", "quantized_kernel", "vpmaddubsw"),
        ("avx2_vnni", "quantized_kernel", "vpdpbusd"),
        # gcc drops calls of functions that only prefetch, where it takes them for ones without an effect.
        ("amx", "attention_tiles_kernel", "prefetcht1"),
        ("avx512", "attention_tiles_kernel", "prefetcht1"),
        ("avx512", "rope_store_kernel", r"prefetch[tw]\d?"),
        ("avx512", "linear_kernel", "prefetcht1"),
        ("amx", "quantized_amx", "prefetcht1"),
        ("avx512", "attention_kernel", "prefetcht1"),
    ],
)
def test_a_level_has_its_instruction(level: str, source: str, instruction: str) -> None:
    assert re.search(rf"\b{instruction}\b", disassembly(level, source)), f"{source} at level {level}"


@pytest.mark.parametrize("level", ["avx512", "avx512_vnni"])
def test_int8_tiles_fetch_the_next_panel(level: str) -> None:
    functions = re.split(r"\n(?=[0-9a-f]{16} <)", disassembly(level, "quantized_kernel"))
    tiles = [text for text in functions if "7Channel4dots" in text.split("\n", 1)[0]]
    assert len(tiles) == 24  # 1 ... 12 rows, as they came and laid out
    # Two lines of the stream ahead, and one of the next panel.
    assert all(len(re.findall(r"\bprefetcht1\b", text)) == 3 for text in tiles)


FORBIDDEN = {
    "scalar": r"%[yz]mm",
    "avx2": r"%zmm|%k[0-7]|%[xy]mm(1[6-9]|2\d|3[01])",
    "avx512_bw": r"\b(vpdp|vdpbf16ps|vcvtne2?ps2?bf16)|%tmm",
    "avx512_vnni": r"\b(vdpbf16ps|vcvtne2?ps2?bf16)|%tmm",
    "avx512": r"%tmm",
}
VNNI_SOURCES = ("quantized_kernel", "attention_tiles_kernel")  # the others are avx512_bw's
SOURCES = ("linear_kernel", "norm_kernel", *VNNI_SOURCES)


@pytest.mark.parametrize(
    ("level", "source"),
    [(level, s) for level in FORBIDDEN for s in SOURCES if level != "avx512_vnni" or s in VNNI_SOURCES],
)
def test_a_level_has_no_instruction_of_a_higher_one(level: str, source: str) -> None:
    found = re.search(FORBIDDEN[level], disassembly(level, source))
    assert found is None, f"{source} at level {level}: {found and found.group()}"
