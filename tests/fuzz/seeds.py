"""The inputs that fuzzing starts from: fine ones made here, and the files of ``corpus``, which fuzzing found."""

from __future__ import annotations

import base64
import json
import struct
import tempfile
from pathlib import Path

from tests.faults.junk import FORM, RICH
from tests.lora.peft_files import CONFIG as PEFT
from tests.models.test_damage import DAMAGES, folder_of, header
from tests.models.test_gguf_file import write_gguf
from tests.models.tiny import CONFIG
from tests.text.test_sentencepiece import model_file

CORPUS = Path(__file__).with_name("corpus")
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank",
         "/v1/score")  # fmt: skip
PIECES = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    ("▁a", -1.0, 1),
    ("b", -2.0, 1),
    ("<0x41>", 0.0, 6),
]


def found(name: str) -> dict[str, bytes]:
    """Return the files of a target's corpus."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / name).glob("*"))}


def seeds_of(name: str) -> list[bytes]:
    """Return what fuzzing of a target starts from."""
    return [*found(name).values(), *_fine(name)]


def fine_tokenizer() -> bytes:
    """Return a small tokenizer.json."""
    with tempfile.TemporaryDirectory() as path:
        return (folder_of(Path(path) / "m") / "tokenizer.json").read_bytes()


def _fine(name: str) -> list[bytes]:
    if name == "request":
        return [
            bytes([PATHS.index(path)]) + json.dumps(body).encode() for path, body in RICH if path in PATHS
        ]
    if name == "form":
        return [bytes([size, 0]) + FORM for size in (255, 3, 40)]
    if name == "sentencepiece":
        return [model_file(PIECES), model_file(PIECES, model_type=2)]
    if name == "tiktoken":
        return [b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))]
    if name == "adapter":
        infinite = header(b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}')
        return [b"0" + json.dumps(PEFT).encode(), b"1", b"1" + infinite, b"1" + header(b"[" * 5000)]
    if name == "config":
        return [json.dumps(CONFIG).encode()]
    with tempfile.TemporaryDirectory() as path:
        if name == "gguf":
            return [write_gguf(Path(path) / "m.gguf").read_bytes()[:4096]]
        file = {"safetensors": "model.safetensors"}.get(name, f"{name}.json")
        fine = (folder_of(Path(path) / "m") / file).read_bytes()
    if name == "safetensors":
        (size,) = struct.unpack_from("<Q", fine)
        fine = fine[: 8 + size + 64]
    return [fine, *(data for to, data in DAMAGES.values() if to == file and len(data) < 8192)]
