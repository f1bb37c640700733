"""Quantize a GGUF file with llama.cpp itself, with the importances that Quire counted on the same text.

    python benchmarks/peers/llamacpp_quantize.py SOURCE.gguf IMATRIX.dat OUT.gguf [--type Q4_K_M] [--threads 2]

Run it in an environment that has llama-cpp-python. The C function takes the importances as a C++ map, which a few lines
of C++ make; so it needs a compiler with the same standard library.
"""

from __future__ import annotations

import argparse
import ctypes
import struct
import subprocess
import tempfile
from pathlib import Path

import llama_cpp

SHIM = """
#include <string>
#include <unordered_map>
#include <vector>
using Map = std::unordered_map<std::string, std::vector<float>>;
extern "C" void *map_new() { return new Map(); }
extern "C" void map_add(void *map, const char *name, const float *values, size_t count) {
    (*static_cast<Map *>(map))[name] = std::vector<float>(values, values + count);
}
"""


def load_shim(folder: Path) -> ctypes.CDLL:
    source, library = folder / "shim.cpp", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    shim = ctypes.CDLL(str(library))
    shim.map_new.restype = ctypes.c_void_p
    shim.map_add.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.POINTER(ctypes.c_float),
        ctypes.c_size_t,
    ]
    return shim


def entries(path: Path) -> dict[str, list[float]]:
    """The importances of a file of the older form."""
    data, found = path.read_bytes(), {}
    (count,), at = struct.unpack_from("<i", data), 4
    for _ in range(count):
        (length,) = struct.unpack_from("<i", data, at)
        name = data[at + 4 : at + 4 + length].decode()
        calls, size = struct.unpack_from("<ii", data, at + 4 + length)
        at += 12 + length
        found[name] = [value / calls for value in struct.unpack_from(f"<{size}f", data, at)]
        at += 4 * size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("imatrix", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="Q4_K_M")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shim = load_shim(Path(folder))
        table = shim.map_new()
        for name, values in entries(given.imatrix).items():
            shim.map_add(table, name.encode(), (ctypes.c_float * len(values))(*values), len(values))
        params = llama_cpp.llama_model_quantize_default_params()
        params.nthread = given.threads
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{given.type}")
        params.imatrix = table
        failed = llama_cpp.llama_model_quantize(
            str(given.source).encode(), str(given.out).encode(), ctypes.byref(params)
        )
    if failed:
        raise SystemExit(f"llama.cpp could not quantize {given.source}")
    print(given.out)


if __name__ == "__main__":
    main()
