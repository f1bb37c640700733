"""The ids that Quill brings for its golden prompt are those that it gives, on every level that this machine has."""

from __future__ import annotations

import json

import pytest

from quire import LLM, SamplingParams
from quire.args import EngineArgs
from quire.config import ARM_LEVELS, X86_LEVELS
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.guard import FILE, NUM_OUTPUT, setup_of
from quire.models.hub import quill_path

pytestmark = pytest.mark.component


@pytest.mark.parametrize("isa", X86_LEVELS + ARM_LEVELS[1:])
@pytest.mark.parametrize("name", ["quill", "quill-draft"])
def test_quill_brings_its_ids(name: str, isa: str) -> None:
    shipped = json.loads((quill_path(name) / FILE).read_text())
    device = detect_device()
    if not device.native or isa not in device.levels:
        pytest.skip(f"this machine has no {isa}")
    config, _ = configure(EngineArgs(model=name, cpu_isa=isa, num_kv_blocks=16, max_model_len=128), device)  # type: ignore[arg-type]
    ids = shipped["ids"].get(setup_of(config))
    if ids is None:
        pytest.skip(f"no ids are shipped for {setup_of(config)}")
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    with LLM(name, cpu_isa=isa, num_kv_blocks=16, max_model_len=128, threads=1) as llm:
        (output,) = llm.generate([{"prompt_token_ids": shipped["prompt"]}], sampling)
    assert list(output.outputs[0].token_ids) == ids
