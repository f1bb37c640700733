"""Thinking budgets and efforts on their way to the engine, by every name they have."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import FakeFrontend

from quire.request import ThinkingBudget

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% endfor %}"
BEGIN, END = 257, 258


def api(template: str = PLAIN, tool_format: str = "reasoning", *, thinks: bool = True) -> Api:
    return Api(FakeFrontend(thinks=thinks, template=template), tool_format=tool_format)


def budget_of(server: Api, path: str = "chat", **fields: Any) -> ThinkingBudget | None:
    messages = [{"role": "user", "content": "hi"}]
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": messages}),
        "messages": ("/v1/messages", {"messages": messages, "max_tokens": 8}),
        "responses": ("/v1/responses", {"input": "hi"}),
    }
    url, body = bodies[path]
    answer = server.post(url, {"model": "tiny", **body, **fields})
    assert answer.status_code == 200, answer.text
    return server.frontend.submitted[-1].sampling.thinking_budget


def test_a_budget_by_each_of_its_names() -> None:
    server = api()
    expected = ThinkingBudget(7, BEGIN, END)
    assert budget_of(server, thinking_token_budget=7) == expected
    assert budget_of(server, "messages", thinking={"type": "enabled", "budget_tokens": 7}) == expected
    assert budget_of(server, thinking_token_budget=0) == ThinkingBudget(0, BEGIN, END)
    assert budget_of(server) is None
    opened = api(PLAIN + "<think>")
    assert budget_of(opened, thinking_token_budget=7) == ThinkingBudget(7, BEGIN, END, is_open=True)
    assert budget_of(opened, thinking_token_budget=7, separate_reasoning=False) is not None


def test_an_effort_that_the_template_does_not_know_is_a_budget() -> None:
    server = api()
    for effort, tokens in (("none", 0), ("minimal", 512), ("low", 1024), ("medium", 8192)):
        assert budget_of(server, reasoning_effort=effort) == ThinkingBudget(tokens, BEGIN, END)
        assert budget_of(server, "responses", reasoning={"effort": effort}) == ThinkingBudget(
            tokens, BEGIN, END
        )
    assert budget_of(server, "messages", output_config={"effort": "low"}) == ThinkingBudget(1024, BEGIN, END)
    for effort in ("high", "xhigh"):
        assert budget_of(server, reasoning_effort=effort) is None
    assert budget_of(server, reasoning_effort="low", thinking_token_budget=3) == ThinkingBudget(3, BEGIN, END)
    knows = api(PLAIN + "{# reasoning_effort #}")
    assert budget_of(knows, reasoning_effort="low") is None


def test_budgets_and_efforts_without_reasoning_change_nothing() -> None:
    server = api(tool_format="plain", thinks=False)
    assert budget_of(server, thinking_token_budget=7) is None
    assert budget_of(server, "messages", thinking={"type": "enabled", "budget_tokens": 7}) is None
    assert budget_of(server, reasoning_effort="none") is None
    assert budget_of(server, "messages", output_config={"effort": "high"}) is None
    assert budget_of(server, reasoning_effort="low") is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget", "≥ 0"),
        ({"thinking_token_budget": "5"}, "thinking_token_budget", "≥ 0"),
        ({"thinking_token_budget": True}, "thinking_token_budget", "≥ 0"),
        (
            {"thinking_token_budget": 5, "allowed_token_ids": [1, 2]},
            "allowed_token_ids",
            "the end of reasoning, 258",
        ),
    ],
)
def test_wrong_budgets(fields: dict[str, Any], param: str, words: str) -> None:
    error = error_of(api().chat(**fields), 400)
    assert error["param"] == param
    assert words in error["message"]


def test_marks_of_several_tokens_are_refused() -> None:
    error = error_of(api(thinks=False).chat(thinking_token_budget=5), 400)
    assert error["param"] == "thinking_token_budget"
    assert "one token each" in error["message"]
    assert (
        error_of(api(tool_format="harmony").chat(thinking_token_budget=5), 400)["param"]
        == "thinking_token_budget"
    )
    error_of(api().complete(thinking_token_budget=5), 400)
    answer = api().post("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8,
                                         "thinking": {"type": "adaptive", "budget_tokens": 5}})  # fmt: skip
    assert answer.status_code == 400
    assert "thinking.budget_tokens = 5" in answer.json()["error"]["message"]
