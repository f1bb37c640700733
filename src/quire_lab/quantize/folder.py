"""The folder that is written: shard by shard under another name, which it gives up for its own once it is whole.

    OUT.partial/run.json                          what is being made, so that another run goes on only with the same
    OUT.partial/model-00003-of-00032.safetensors  written under a name with .tmp, synced, renamed
    OUT.partial/model-00003-of-00032.json         what the report says of it
    OUT.partial/whole                             the folder with a GGUF file, which is made from the shards
    OUT.partial/NAME-rotated                      the checkpoint that is rounded with --rotate

A process that is killed leaves whole shards; the next one with the same arguments makes the rest.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.models.safetensors_file import INDEX_NAME, StoredTensor, read_safetensors

_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8", torch.int32: "I32",
    torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
RUN, REPORT = "run.json", "quire_quantize.json"
COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "README.md")


class OutFolder:
    """The result while it is made."""

    def __init__(self, final: Path, run: Mapping[str, Any], num_shards: int, *, apart: bool = False) -> None:
        """Begin, or go on where a run of the same ``run`` was ended.

        ``apart``: the result is made from the shards, in a folder of its own.

        Raises:
            ConfigError: ``final`` exists, or what is under the other name is of another run.
        """
        self.final, self.path = final, final.with_name(f"{final.name}.partial")
        self.result = self.path / "whole" if apart else self.path
        self._num_shards = num_shards
        if final.exists():
            raise ConfigError(f"out = {str(final)!r} exists; give a folder that does not")
        text = json.dumps(run, indent=1, sort_keys=True)
        if self.path.exists():
            known = self.path / RUN
            if not known.is_file() or known.read_text() != text:
                raise ConfigError(
                    f"{self.path} was left by a run with other arguments, or of another model; delete it, or give "
                    "another out"
                )
            return
        try:
            self.path.mkdir(parents=True)
            self._write(self.path / RUN, text.encode())
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error}") from None

    def shard(self, index: int) -> Path:
        """Return where shard ``index`` lies, from 0 on."""
        return self.path / f"model-{index + 1:05}-of-{self._num_shards:05}.safetensors"

    def entries(self, index: int) -> list[dict[str, Any]] | None:
        """Return what was noted with shard ``index``, None where there is no such shard yet."""
        note = self.shard(index).with_suffix(".json")
        if not note.is_file() or not self.shard(index).is_file():
            return None
        entries: list[dict[str, Any]] = json.loads(note.read_text())
        return entries

    def add(self, index: int, tensors: Mapping[str, Tensor], entries: list[dict[str, Any]]) -> None:
        """Write shard ``index``, and what the report says of it. Raises `ConfigError` for a full disk."""
        path = self.shard(index)
        try:
            temporary = path.with_suffix(".tmp")
            write_safetensors(temporary, tensors)
            temporary.rename(path)
            self._write(path.with_suffix(".json"), json.dumps(entries).encode())
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error}; what is whole stays in {self.path}, and the same command goes on "
                "from there"
            ) from None

    def stored(self) -> dict[str, StoredTensor]:
        """Return the tensors of all shards."""
        shards = (read_safetensors(self.shard(index)) for index in range(self._num_shards))
        return {name: tensor for shard in shards for name, tensor in shard.items()}

    def state(self, layer: int) -> Path:
        """Return where the hidden states lie that enter ``layer``."""
        return self.path / f"hidden-{layer:05}.safetensors"

    def keep_state(self, layer: int, hidden: Tensor) -> None:
        """Write what enters ``layer``, for a run that goes on there; before the shard of the layer before it."""
        path = self.state(layer)
        try:
            write_safetensors(path.with_suffix(".tmp"), {"hidden": hidden})
            path.with_suffix(".tmp").rename(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from None

    def drop_states(self, before: int) -> None:
        """Delete the hidden states that enter layers before ``before``."""
        for path in self.path.glob("hidden-*.safetensors"):
            if path < self.state(before):
                path.unlink()

    def finish(self, report: Mapping[str, Any]) -> None:
        """Write ``report``, and give the complete folder its name."""
        try:
            self._write(self.result / REPORT, json.dumps(report, indent=1).encode())
            if self.result != self.path:
                self.result.rename(self.final)
                _sync(self.final.parent)
                self.discard()
                return
            for index in range(self._num_shards):
                self.shard(index).with_suffix(".json").unlink(missing_ok=True)
            (self.path / RUN).unlink()
            self.path.rename(self.final)
            _sync(self.final.parent)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be finished: {error}") from None

    def complete(self, source: Path, config: Mapping[str, Any]) -> None:
        """Make the folder one that can be served: the index, ``config`` and copies of the files of ``source``."""
        self.drop_states(self._num_shards)
        # The tokens that a source's golden prompt has are not those of the rounded weights.
        known = {INDEX_NAME, "config.json", "golden.json", RUN, REPORT}
        for path in sorted({path for pattern in COPIED for path in source.glob(pattern)}):
            if path.name not in known and path.is_file():
                shutil.copyfile(path, self.path / path.name)
        places: dict[str, str] = {}
        total = 0
        for index in range(self._num_shards):
            header, size = read_header(self.shard(index))
            places |= dict.fromkeys(header, self.shard(index).name)
            total += size
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=1)
        self._write(self.path / INDEX_NAME, index_text.encode())
        self._write(self.path / "config.json", json.dumps(config, indent=1).encode())

    def discard(self) -> None:
        """Delete what was written."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f"{path.name}.tmp")
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` as one safetensors file, synced to the disk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    # The largest elements first, so that each tensor is aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        stop = start + tensors[name].nbytes
        header[name] = {
            "dtype": _NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [start, stop],
        }  # fmt: skip
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def read_header(path: Path) -> tuple[list[str], int]:
    """Return the names of a file's tensors, and their bytes."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return list(header), max((entry["data_offsets"][1] for entry in header.values()), default=0)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
