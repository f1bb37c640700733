"""`describe`: folders and GGUF files, generation defaults, damage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.models.tiny import tensors, write_model

from quire.errors import ModelLoadError
from quire.models.checkpoint import GenerationDefaults, describe


def test_a_folder(tmp_path: Path) -> None:
    found = describe(write_model(tmp_path, tensors(torch.float16)))
    assert (found.kind, found.dtype, found.spec.dtype) == ("safetensors", "float16", "float16")
    assert found.files == (tmp_path / "model.safetensors",)
    assert found.weight_bytes == (tmp_path / "model.safetensors").stat().st_size
    assert found.tokenizer == tmp_path
    assert found.generation == GenerationDefaults()
    assert found.spec.eos_token_ids == (2,)


def test_generation_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [5, 2], "temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True})
    )
    found = describe(tmp_path)
    assert found.spec.eos_token_ids == (5, 2)
    assert found.generation == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20)
    (tmp_path / "generation_config.json").write_text('{"top_p": "high"}')
    assert describe(tmp_path).generation == GenerationDefaults()


def test_random_needs_a_configuration_alone(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found = describe(tmp_path, "random")
    assert (found.kind, found.files, found.dtype) == ("random", (), "float32")
    with pytest.raises(ModelLoadError, match="holds no weights"):
        describe(tmp_path)


def test_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor a GGUF"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json is not readable JSON"):
        describe(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="no JSON object"):
        describe(tmp_path)


def test_a_truncated_shard_is_found_before_loading(tmp_path: Path) -> None:
    write_model(tmp_path, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"00002-of-00002.safetensors is truncated"):
        describe(tmp_path)


def test_torch_is_not_needed(tmp_path: Path) -> None:
    write_model(tmp_path)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from quire.models.checkpoint import describe\n"
        f"print(describe(Path({str(tmp_path)!r})).spec.num_params)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
