"""OpenAI's client asks for forms: each holds, streamed and whole, alone, in samples and with others in the batch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.e2e.asking import ask
from tests.e2e.live import LiveServer

from quire.models.hub import quill_path

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WORDS = "[a-z]{2,9}(,[a-z]{2,9}){2,5}"
GRAMMAR = 'root ::= word ("," word){2,5}\nword ::= [a-z]{2,9}'


def is_person(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and 0 <= value["age"] <= 99 and len(value["name"]) <= 16


def matches(pattern: str) -> Any:
    return lambda text: re.fullmatch(pattern, text) is not None


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA, "strict": True}}},
        is_person,
    ),
    "json": ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, is_person),
    "regex": ({"structured_outputs": {"regex": r"[A-Z][a-z]{2,9}: \d{1,3}"}}, matches(r"[A-Z][a-z]{2,9}: \d{1,3}")),
    "choice": ({"structured_outputs": {"choice": ["aye", "nay"]}}, matches("aye|nay")),
    "grammar": ({"structured_outputs": {"grammar": GRAMMAR}}, matches(WORDS)),
    "guided_json": ({"guided_json": json.dumps(SCHEMA)}, is_person),
    "guided_choice": ({"guided_choice": ["aye", "nay"]}, matches("aye|nay")),
    "ebnf": ({"ebnf": GRAMMAR}, matches(WORDS)),
}  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    log = tmp_path_factory.mktemp("structured") / "log"
    model = ["serve", str(quill_path("quill")), "--served-model-name", "tiny", "--num-kv-blocks", "64"]
    with LiveServer(
        ["-m", "quire.cli", *model, "--max-model-len", "512", "--port", "0", "--threads", "1"], log
    ) as live:
        with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
            yield made
        assert live.stop() == 0, log.read_text()


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(client: openai.OpenAI, form: str, chat: bool) -> None:
    fields, fits = FORMS[form]
    fields = {**fields, "max_tokens": 200, "seed": 3, "temperature": 0.8, "n": 2}
    whole = ask(client, chat=chat, stream=False, **fields)
    streamed = ask(client, chat=chat, stream=True, **fields)
    assert [(a.text, a.token_ids, a.finish_reason) for a in whole] == [
        (a.text, a.token_ids, a.finish_reason) for a in streamed
    ]
    for answer in whole:
        assert answer.finish_reason == "stop", answer
        assert fits(answer.text), answer.text


def test_any_json_object(client: openai.OpenAI) -> None:
    texts = []
    for seed in range(6):
        fields = {
            "response_format": {"type": "json_object"},
            "logit_bias": {},
            "max_tokens": 300,
            "seed": seed,
        }
        (answer,) = ask(client, chat=True, stream=bool(seed % 2), temperature=1.0, **fields)
        assert answer.text.startswith("{")
        if answer.finish_reason == "stop":
            texts.append(json.loads(answer.text))
    assert all(isinstance(value, dict) for value in texts)


def test_tokens_among_others_are_those_alone(client: openai.OpenAI) -> None:
    """Nine requests of two samples in 64 blocks: some are preempted in the middle of a form."""
    jobs = [
        {
            **FORMS[form][0],
            "prompt": f"Chapter {i}. " + "The sea. " * 12,
            "seed": i,
            "n": 2,
            "max_tokens": 120,
        }
        for i, form in enumerate([*FORMS, "json"])
    ]

    def tokens(job: dict[str, Any]) -> list[list[int]]:
        return [a.token_ids for a in ask(client, chat=False, stream=False, temperature=1.0, **job)]

    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(tokens, jobs))
    assert together == [tokens(job) for job in jobs]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"type": "object", "unevaluatedProperties": False}}, "guided_json", "unevaluatedProperties"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-ahead"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "nothing"),
        ({"response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "strict": True, "schema": {"type": "object", "unevaluatedProperties": False}}}},
         "response_format.json_schema.schema", "unevaluatedProperties"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, chat=True, stream=True, **fields)
    assert caught.value.param == param
    assert words in caught.value.message


def test_deep_and_huge_schemas_are_refused_and_the_server_lives(client: openai.OpenAI) -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    pattern = "(a|b|ab|ba){1,300}c{100}[a-z]{1,900}"
    wide = {"type": "object", "properties": {f"k{i}": {"pattern": pattern + str(i)} for i in range(3000)}}
    for schema in (deep, wide):
        with pytest.raises(openai.BadRequestError):
            ask(client, chat=True, stream=False, guided_json=schema)
    (answer,) = ask(client, chat=True, stream=False, guided_choice=["aye"], max_tokens=10)
    assert answer.text == "aye"


def test_logprobs_of_a_choice_are_shares_of_the_choices(client: openai.OpenAI, tmp_path: Path) -> None:
    (answer,) = ask(client, chat=True, stream=False, guided_choice=["aye", "nay"], logprobs=True, top_logprobs=5,
                    temperature=0, max_tokens=10)  # fmt: skip
    first = answer.logprobs[0]
    likely = [top.logprob for top in first.top_logprobs if top.logprob > -9999]
    assert first.logprob == max(likely)
    assert sum(2.718281828459045**p for p in likely) == pytest.approx(1.0, abs=1e-3)
