"""The models that ship, as transformers runs them, in float32."""

from __future__ import annotations

import pytest
import torch
from tests.parity.harness import TOLERANCE, compare, prompts_of, run_ragged
from transformers import AutoModelForCausalLM

from quire.models.hub import QUILL_NAMES, quill_path


@pytest.mark.parametrize("name", QUILL_NAMES)
def test_shipped_model(name: str) -> None:
    path = quill_path(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    run = run_ragged(path, prompts_of(4096, 1, (1, 13, 29)), 512, new_tokens=8)
    assert compare(run, model.eval()) <= TOLERANCE
