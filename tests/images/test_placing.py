"""Images in token ids: a span for each run of placeholders, and refusals where placeholders and images differ."""

from __future__ import annotations

import pytest
from tests.api.fake_frontend import byte_tokenizer

from quire.engine.prompts import ModelInfo, prepare_request
from quire.errors import RequestError
from quire.images.placing import with_images
from quire.images.prepared import Piece, PreparedImage
from quire.request import SamplingParams, Terms
from quire.spans import salted
from quire.vision_spec import VisionSpec

IMAGE, MARK = 9, 8
VISION = VisionSpec("idefics3", 8, 1, 1, 8, "gelu", 1e-6, 8, 2, 2, 8, IMAGE)  # four tokens per tile


def encode(text: str) -> list[int]:
    return [int(character) for character in text]


def image(*contents: bytes) -> PreparedImage:
    text = "".join(f"{MARK}{str(IMAGE) * 4}" for _ in contents) + str(MARK)
    return PreparedImage(text, tuple(Piece((8, 8), content) for content in contents))


def test_each_run_of_placeholders_is_a_span_of_its_piece() -> None:
    ids = with_images([1, IMAGE, 2, IMAGE], [image(b"a", b"b"), image(b"c")], VISION, encode)
    assert list(ids) == [1, *[8, 9, 9, 9, 9] * 2, 8, 2, 8, 9, 9, 9, 9, 8]
    assert [(span.start, span.length, span.data) for span in ids.spans] == [
        (2, 4, b"a"),
        (7, 4, b"b"),
        (14, 4, b"c"),
    ]
    assert all({ids[at] for at in range(span.start, span.end)} == {IMAGE} for span in ids.spans)
    assert len({span.content for span in ids.spans}) == 3


@pytest.mark.parametrize("prompt", [[1, 2], [IMAGE, IMAGE]], ids=["fewer", "more"])
def test_placeholders_and_images_must_be_as_many(prompt: list[int]) -> None:
    with pytest.raises(RequestError, match="1 images") as error:
        with_images(prompt, [image(b"a")], VISION, encode)
    assert error.value.param == "messages"


def test_ids_with_spans_cannot_be_cut() -> None:
    ids = with_images([IMAGE], [image(b"a")], VISION, encode)
    with pytest.raises(RequestError) as error:
        ids[2:]
    assert error.value.param == "truncate_prompt_tokens"


def test_images_have_other_names_for_callers_with_another_salt() -> None:
    """Or who times first tokens would learn which images others sent."""
    model = ModelInfo(names=("tiny",), max_model_len=64, vocab_size=259, eos_token_ids=())
    names = {}
    for salt in ("", "a", "b"):
        ids = with_images([1, IMAGE, 2, IMAGE], [image(b"a"), image(b"c")], VISION, encode)
        request = prepare_request(
            "r", ids, SamplingParams(max_tokens=1), model, byte_tokenizer(), seed=1, arrival_s=0.0,
            terms=Terms(cache_salt=salt),
        )  # fmt: skip
        assert [span.data for span in request.spans] == [b"a", b"c"]
        names[salt] = [span.content for span in request.spans]
        assert names[salt] == [span.content for span in salted(ids.spans, salt)]
    assert len({name for each in names.values() for name in each}) == 6
