"""The claims of docs/conversations.md, of today's build: ends, system prompts, schemas, tool calls, a needle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tools.conversations import NEEDLE, PAGE, Server, cases, serving, text_of
from tools.real_models import QWEN25_CODER, SMOLLM2, RealModel

from quire.models.wheels import real_models_folder

pytestmark = [pytest.mark.real, pytest.mark.system]


@pytest.fixture(
    scope="module",
    # CI has no larger model, and this one takes as long as 200 other tests.
    params=[SMOLLM2, pytest.param(QWEN25_CODER, marks=pytest.mark.slow)],
    ids=["smollm2", "qwen2.5-coder"],
)
def running(request: pytest.FixtureRequest) -> Iterator[tuple[RealModel, Server]]:
    model: RealModel = request.param
    if not (real_models_folder() / model.file).is_file():
        pytest.skip(f"{model.name} is not on this machine: run `make real-models ARGS=--all`")
    with serving(model) as server:
        yield model, server


def test_each_claim_holds(running: tuple[RealModel, Server]) -> None:
    model, server = running
    failed = {case.title: choice for case in cases(model) if not case.holds(choice := server.ask(case.body))}
    assert not failed


def test_a_needle_is_found_in_2000_tokens(running: tuple[RealModel, Server]) -> None:
    model, server = running
    messages = server.needle(2000)
    assert 1800 < len(server.tokens(messages)) < 2300
    answer = text_of(server.ask({"messages": messages}, max_tokens=16))
    if model is QWEN25_CODER:  # SmolLM2 does not find it with transformers either
        assert "marmalade" in answer
    assert answer.strip()


def test_the_page_has_each_conversation() -> None:
    page = PAGE.read_text()
    for model in (SMOLLM2, QWEN25_CODER):
        part = page.partition(f"## {model.name}\n")[2]
        assert all(f"### {case.title}\n" in part for case in cases(model))
        assert NEEDLE in part
