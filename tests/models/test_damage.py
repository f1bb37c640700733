"""Damaged model files: one clear line each, never a traceback and never a hang. Seeded: a failure prints its seed."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.models.test_gguf_file import write_gguf
from tests.models.tiny import write_model
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from quire.cli.check_model import check_model
from quire.errors import ModelLoadError, QuireError
from quire.models.checkpoint import describe, read_tokenizer
from quire.text.chat_template import ChatTemplate

LIMIT_S = 60
NESTED = 100_000
WORDS: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**32,
    2**63,
    10**12,
    1e308,
    "",
    "x",
    "NaN",
    [],
    {},
    [[]],
    {"a": []},
]


class TooLong(BaseException):
    """A load did not end."""


@contextmanager
def in_time(seconds: int = LIMIT_S) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read_all(path: Path) -> None:
    """Read what a server reads of a model before its weights."""
    found = describe(path)
    tokenizer = read_tokenizer(found.tokenizer)
    ChatTemplate.of(tokenizer, datetime.now)


def refused(read: Callable[[], object]) -> str:
    """Return the line of the error; "" where the damage is harmless."""
    line = ""
    try:
        with in_time():
            read()
    except QuireError as error:
        line = str(error)
    assert "\n" not in line
    assert len(line) < 2000
    return line


def folder_of(path: Path) -> Path:
    """Write a tiny model with a tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    write_model(path)
    vocab = {chr(97 + i): i for i in range(26)} | {"ab": 26}
    backend = Backend(BPE(vocab, [("a", "b")]))
    backend.decoder = ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    special = {"eos_token": "<e>", "additional_special_tokens": ["<x>"], "chat_template": "{{ messages }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(special))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "top_k": 5}))
    return path


def nested(text: str) -> bytes:
    return (text * NESTED).encode()


def header(document: object) -> bytes:
    raw = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_nested() -> bytes:
    key = struct.pack("<Q", 1) + b"k"
    arrays = struct.pack("<IQ", 9, 1) * NESTED
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 9) + arrays


DAMAGES: dict[str, tuple[str, bytes]] = {
    "config nested": ("config.json", b'{"a":' + nested("[")),
    "tokenizer config nested": ("tokenizer_config.json", b'{"a":' + nested("[")),
    "tokenizer nested": ("tokenizer.json", b'{"model":' + nested('{"a":')),
    "generation nested": ("generation_config.json", nested("[")),
    "header nested": ("model.safetensors", header(b'{"a":' + nested("["))),
    "shape Infinity": (
        "model.safetensors",
        header(b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}'),
    ),
    "shape negative": (
        "model.safetensors",
        header({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}),
    ),
    "ids beyond 32 bits": ("added_tokens.json", json.dumps({"<big>": 2**40}).encode()),
    "ids of 32 bits": ("added_tokens.json", json.dumps({"<big>": 2**32 - 2}).encode()),
    "config of Infinity": ("config.json", b'{"architectures":["LlamaForCausalLM"],"vocab_size":Infinity}'),
    "config of a long number": ("config.json", b'{"vocab_size":' + b"9" * 5000 + b"}"),
    "not UTF-8": ("tokenizer.json", b'{"\xff"'),
    "a template that does not parse": ("chat_template.jinja", b"{% for %}" * 1000),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_one_clear_line(name: str, tmp_path: Path) -> None:
    file, data = DAMAGES[name]
    folder = folder_of(tmp_path / "m")
    assert refused(lambda: read_all(folder)) == ""
    (folder / file).write_bytes(data)
    line = refused(lambda: read_all(folder))
    assert line or name in ("tokenizer config nested",), "it was read"


@pytest.mark.parametrize("value", [10**12, 10**6, float("inf"), "2", -1])
def test_a_count_of_layers_that_makes_no_sense(value: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")
    write_model(folder, num_hidden_layers=value)
    assert "num_hidden_layers" in refused(lambda: read_all(folder))


@pytest.mark.parametrize(
    "file",
    ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json", "chat_template.jinja"],
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(file: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    line = refused(lambda: read_all(folder))
    assert line or file in ("generation_config.json", "chat_template.jinja")


def test_a_gguf_file_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_nested())
    assert "m.gguf" in refused(lambda: describe(path))


def changed(value: Any, rng: Random) -> Any:
    """Return ``value`` with one thing in it replaced, removed or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        kept = {k: v for k, v in value.items() if k != key or rng.random() < 0.9}
        return {**kept, key: changed(value[key], rng)} if key in kept else kept
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], changed(value[at], rng), *value[at + (rng.random() < 0.8) :]]
    return rng.choice(WORDS)


def corrupt(data: bytes, rng: Random) -> bytes:
    """Return ``data`` with bytes changed, cut off or repeated."""
    kind = rng.randrange(3)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    made = bytearray(data)
    for _ in range(rng.randrange(1, 9)):
        made[rng.randrange(min(len(made), 2000))] = rng.choice((0, 255, 127, rng.randrange(256)))
    return bytes(made) if kind == 1 else bytes(made) + bytes(made[:100])


NUM_SEEDS = 40
JSON_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.mark.parametrize("start", range(0, NUM_SEEDS, 10))
def test_random_damage_never_escapes_as_another_error(start: int, tmp_path: Path) -> None:
    fuzz(tmp_path, range(start, start + 10))


@pytest.mark.slow
def test_much_random_damage(tmp_path: Path) -> None:
    fuzz(tmp_path, range(1000, 4000))


def fuzz(tmp_path: Path, seeds: range) -> None:
    folder, path = folder_of(tmp_path / "m"), tmp_path / "m.gguf"
    write_gguf(path)
    whole = {file: (folder / file).read_bytes() for file in (*JSON_FILES, "model.safetensors")}
    gguf_bytes, num_refused = path.read_bytes(), 0
    for seed in seeds:
        print("seed", seed)
        rng = Random(seed)
        file = rng.choice([*whole, *whole, "m.gguf"])
        if file == "m.gguf":
            path.write_bytes(corrupt(gguf_bytes, rng))
            num_refused += refused(lambda: describe(path)) != ""
            continue
        if file in JSON_FILES and rng.random() < 0.7:
            damaged = json.dumps(changed(json.loads(whole[file]), rng)).encode()
        else:
            damaged = corrupt(whole[file], rng)
        (folder / file).write_bytes(damaged)
        num_refused += refused(lambda: read_all(folder)) != ""
        (folder / file).write_bytes(whole[file])
    assert num_refused >= len(seeds) // 4


def test_doctor_check_reads_tokenizer_and_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path / "m")
    assert check_model(str(folder)) == 0
    assert "tokenizer: 29 ids; chat template default: compiles" in capsys.readouterr().out
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ModelLoadError, match="template"):
        check_model(str(folder))
    (folder / "chat_template.jinja").unlink()
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["vocab"] |= {f"w{i}": i for i in range(27, 80)}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(ModelLoadError, match=r"ids up to \d+, and the model has 64 tokens"):
        check_model(str(folder))
