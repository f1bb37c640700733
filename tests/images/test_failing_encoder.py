"""An image that an encoder cannot take fails its own request, not the step of others."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="the extra `images` is not installed")

from tests.images.test_seeing import load
from tests.images.tiny_vlm import TILE, make_model

from quire import SamplingParams
from quire.images.placing import SpannedIds
from quire.images.prepared import Piece

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def test_image_that_fails_fails_its_request_alone(tmp_path: Path) -> None:
    make_model(tmp_path)
    with load(tmp_path) as llm:
        image_id = llm.model.vision.image_token_id if llm.model.vision is not None else -1
        (fine,) = llm.generate({"prompt_token_ids": [65, 66, 67]}, GREEDY, use_tqdm=False)
        broken = SpannedIds([65, *[image_id] * 4, 66])
        broken.spans = (Piece((TILE, TILE), b"too few pixels").span(1, 4),)
        prompts = [{"prompt_token_ids": [65, 66, 67]}, {"prompt_token_ids": broken}]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]
    assert outputs[0].outputs[0].token_ids == fine.outputs[0].token_ids
