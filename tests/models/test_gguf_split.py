"""Split GGUF files: any part finds the others, and what is missing, twice there or in the wrong place is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.models.test_gguf_file import write_gguf
from tests.models.tiny import model_config

from quire.errors import ModelLoadError
from quire.models.checkpoint import describe
from quire.models.fingerprint import identity
from quire.models.gguf_file import read_gguf
from quire.models.gguf_split import pick_gguf
from quire.models.hub import locate
from quire.models.loader import iter_weights


def split(path: Path, folder: Path, count: int, name: str = "model") -> list[Path]:
    """Deal the tensors of a file to ``count`` parts, as `llama-gguf-split` does; the first has the metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(path)
    parts = []
    per_part = -(-len(reader.tensors) // count)
    for index in range(count):
        target = folder / f"{name}-{index + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(target, "llama")
        for field in reader.fields.values() if index == 0 else ():
            if field.name.startswith("GGUF.") or field.name == "general.architecture":
                continue
            kind = field.types[0]
            of = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, of)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[index * per_part : (index + 1) * per_part]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(target)
    return parts


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "whole.gguf", kind="Q8_0")


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    found = describe(path)
    loaded = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    return {name: weight for name, weight in loaded.items() if isinstance(weight, torch.Tensor)}


def test_any_part_gives_the_whole_model(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, tmp_path / "parts", 3)
    expected = weights_of(whole)
    for path in (*parts, tmp_path / "parts"):
        found = describe(path)
        assert (found.path, found.files) == (parts[0], tuple(parts))
        assert found.spec == describe(whole).spec
        loaded = weights_of(path)
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    files = {tensor.file for tensor in read_gguf(parts[1]).tensors.values()}
    assert files == set(parts)


def test_a_missing_part_is_named(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, tmp_path / "parts", 3)
    parts[1].unlink()
    for path in (parts[0], parts[2], tmp_path / "parts"):
        with pytest.raises(
            ModelLoadError, match=r"1 of the 3 parts .* missing, first model-00002-of-00003\.gguf"
        ):
            describe(path)
    parts[0].unlink()
    with pytest.raises(ModelLoadError, match=r"2 of the 3 parts .* first model-00001-of-00003\.gguf"):
        describe(tmp_path / "parts")


def test_a_part_in_the_place_of_another_is_found(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, tmp_path / "parts", 3)
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelLoadError, match=r"named as part 3 of 3 and says that it is part 2 of 3"):
        describe(parts[0])


def test_a_tensor_that_two_parts_have_is_found(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, tmp_path / "parts", 2)
    data = bytearray(parts[0].read_bytes())
    at = data.index(b"split.no") + len(b"split.no") + 4
    assert data[at : at + 2] == bytes(2)
    data[at] = 1
    parts[1].write_bytes(data)
    with pytest.raises(
        ModelLoadError, match=r"00002-of-00002\.gguf has .*, which .*00001-of-00002\.gguf has too"
    ):
        describe(parts[0])


def test_a_part_with_fewer_tensors_is_found(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, tmp_path / "parts", 2)
    total = len(gguf.GGUFReader(whole).tensors)
    data = parts[0].read_bytes()
    key = b"split.tensors.count"
    at = data.index(key) + len(key) + 4
    assert int.from_bytes(data[at : at + 4], "little") == total
    parts[0].write_bytes(data[:at] + (total + 1).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelLoadError, match=rf"says {total + 1} tensors and its 2 parts have {total}"):
        describe(parts[0])


def test_every_part_counts_for_the_identity(whole: Path, tmp_path: Path) -> None:
    parts = split(whole, tmp_path / "parts", 3)
    before = identity(parts[0])
    parts[2].write_bytes(parts[2].read_bytes())
    assert identity(parts[0]) != before


def test_a_quantization_of_a_folder_picks_a_split_model(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    parts = split(whole, folder, 2, name="m-Q8_0")
    split(whole, folder, 2, name="m-Q8_0_L")
    shutil.copy(whole, folder / "mmproj-m-Q8_0.gguf")
    assert locate(f"{folder}:Q8_0") == parts[0]
    with pytest.raises(ModelLoadError, match=r"2 GGUF files \(m-Q8_0-00001-of-00002\.gguf, m-Q8_0_L-00001"):
        describe(folder)
    names = ["a-Q4_K_M-00001-of-00002.gguf", "a-Q4_K_M-00002-of-00002.gguf", "README.md"]
    assert pick_gguf("x", "q4_k_m", names) == names[0]
