"""What each format's text means: content, reasoning, calls, malformed text; however it is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.text.test_output_round_trip import merged

from quire.args import ServerArgs, settings_of
from quire.text.output.detect import detect_format
from quire.text.output.formats import (
    FORMATS,
    CallDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    prompt_opening,
)
from quire.text.output.parser import OutputParser

TOOLS: dict[str, Any] = {
    "get": {
        "properties": {
            "city": {"type": "string"},
            "n": {"type": "integer"},
            "any": {},
            "maybe": {"type": ["string", "null"]},
        }
    },
    "now": {"properties": {}},
}
DS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def parse(name: str, pieces: list[str], **kwargs: Any) -> list[Delta]:
    parser = OutputParser(FORMATS[name], TOOLS, **kwargs)
    return merged([delta for piece in pieces for delta in parser.feed(piece)] + parser.finish())


def every_cut(name: str, text: str, **kwargs: Any) -> list[Delta]:
    """Return what the text means, after a check that every cut in two and single characters mean the same."""
    whole = parse(name, [text], **kwargs)
    assert parse(name, list(text), **kwargs) == whole
    for at in range(len(text) + 1):
        assert parse(name, [text[:at], text[at:]], **kwargs) == whole, at
    return whole


def call(arguments: Any, name: str = "get", index: int = 0, call_id: str | None = None) -> list[Delta]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [CallDelta(index, text, name, call_id)]


def joined(deltas: list[Delta]) -> list[Delta]:
    """Return each call's first delta with all its arguments."""
    result: list[Delta] = []
    for delta in deltas:
        if isinstance(delta, CallDelta) and delta.name is None:
            last = result[-1]
            assert isinstance(last, CallDelta)
            result[-1] = last._replace(arguments=last.arguments + delta.arguments)
        else:
            result.append(delta)
    return result


CASES: list[tuple[str, str, list[Delta]]] = [
    ("plain", "a <think> b </think>\n ", [ContentDelta("a <think> b </think>\n ")]),
    ("reasoning", "<think>\nWhy\n</think>\n\nBecause.\n", [ReasoningDelta("Why"), ContentDelta("Because.\n")]),
    ("reasoning", "Text about <think> tags", [ContentDelta("Text about <think> tags")]),
    ("reasoning", "<think>never ends ", [ReasoningDelta("never ends ")]),
    ("hermes", "Hi <b>you</b>", [ContentDelta("Hi <b>you</b>")]),
    (
        "hermes",
        'Sure.\n<tool_call>\n{"name": "get", "arguments": {"city": "}\\"{"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>\n',
        [ContentDelta("Sure."), *call({"city": '}"{'}), *call("{}", "now", 1)],
    ),
    (
        "hermes",
        '<think>a</think>ok<tool_call>{"name": "now"}</tool_call> then',
        [ReasoningDelta("a"), ContentDelta("ok"), *call("{}", "now"), ContentDelta("then")],
    ),
    ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"n\\": 1}"}</tool_call>', call({"n": 1})),
    ("hermes", "<tool_call>not json</tool_call>", [ContentDelta("<tool_call>not json</tool_call>")]),
    ("hermes", '<tool_call>{"nam', [ContentDelta('<tool_call>{"nam')]),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"ci', call('{"ci')),
    ("hermes", "a < b <tool_ca", [ContentDelta("a < b <tool_ca")]),
    ("llama3-json", '{"name": "get", "parameters": {"n": 3}}', call({"n": 3})),
    (
        "llama3-json",
        '{"name": "get", "parameters": {}}; {"name": "now", "parameters": {}}',
        [*call("{}"), *call("{}", "now", 1)],
    ),
    ("llama3-json", '{"name": "other", "age": 3}', [ContentDelta('{"name": "other", "age": 3}')]),
    ("llama3-json", "{not a call}", [ContentDelta("{not a call}")]),
    ("llama3-json", '<|python_tag|>{"name": "x", "parameters": {}}', call("{}", "x")),
    (
        "mistral-json",
        '[TOOL_CALLS] [{"name": "get", "arguments": {"n": 1}, "id": "abc"}, {"id": "d", "name": "now"}]',
        [*call({"n": 1}), *call("{}", "now", 1, "d")],
    ),
    (
        "mistral",
        'Ok.[TOOL_CALLS]get[CALL_ID]a1[ARGS]{"n": 1}[TOOL_CALLS]now[ARGS]{}',
        [ContentDelta("Ok."), *call({"n": 1}, call_id="a1"), *call("{}", "now", 1)],
    ),
    (
        "deepseek-v3.1",
        f'{DS[0]}{DS[1]}get{DS[2]}{{"n": 1}}{DS[3]}{DS[1]}now{DS[2]}{{}}{DS[3]}{DS[4]}',
        [*call({"n": 1}), *call("{}", "now", 1)],
    ),
    (
        "kimi-k2",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{"n": 1}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        call({"n": 1}, call_id="functions.get:0"),
    ),
    (
        "qwen3-coder",
        "Ok\n<tool_call>\n<function=get>\n<parameter=city>\n 12\n\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "<parameter=any>\n[1, true]\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n</function>\n</tool_call>",
        [ContentDelta("Ok"), *call({"city": " 12\n", "n": 3, "any": [1, True], "maybe": None})],
    ),
    ("qwen3-coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", call("{}", "now")),
    (
        "glm-4.x",
        "<tool_call>get\n<arg_key>city</arg_key>\n<arg_value>5</arg_value>\n<arg_key>n</arg_key><arg_value>5</arg_value>"
        "\n</tool_call><tool_call>now</tool_call>",
        [*call({"city": "5", "n": 5}), *call("{}", "now", 1)],
    ),
    (
        "minimax",
        '<minimax:tool_call>\n<invoke name="get">\n<parameter name="city">Y</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [*call({"city": "Y"}), *call("{}", "now", 1)],
    ),
    (
        "llama4-pythonic",
        '[get(city="a, b)", n=-1, any=[1, {"k": null}]), now()]',
        [*call({"city": "a, b)", "n": -1, "any": [1, {"k": None}]}), *call("{}", "now", 1)],
    ),
    ("llama4-pythonic", "[1] is a footnote", [ContentDelta("[1] is a footnote")]),
    ("lfm2", '<|tool_call_start|>[get("x", n=2)]<|tool_call_end|>Done', [
        *call({"city": "x", "n": 2}), ContentDelta("Done"),
    ]),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get "
        '<|constrain|>json<|message|>{"n": 1}<|call|>',
        [ReasoningDelta("Hm."), *call({"n": 1})],
    ),
    (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes. ",
        [ReasoningDelta("Hm."), ContentDelta("Yes. ")],
    ),
    ("harmony", "No header", [ContentDelta("No header")]),
    ("gemma-4", '<|tool_call>call:get{city:<|"|>a}<|"|>,n:3,any:[True,{b:null}]}<tool_call|>', call(
        {"city": "a}", "n": 3, "any": [True, {"b": None}]}
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_formats(name: str, text: str, expected: list[Delta]) -> None:
    assert joined(every_cut(name, text)) == expected


def test_a_prompt_that_opened_the_reasoning() -> None:
    format = FORMATS["hermes"]
    opening = prompt_opening(format, "<|im_start|>assistant\n<think>\n")
    assert opening == "<think>"
    assert every_cut("hermes", "Hm.\n</think>\n\nYes.", opening=opening) == [
        ReasoningDelta("Hm."),
        ContentDelta("Yes."),
    ]
    assert prompt_opening(format, "<think>\n\n</think>\n\n") == ""


def test_special_tokens_do_not_show() -> None:
    hidden = ("<|im_end|>", "<tool_call>")
    text = 'a<|im_end|>b<tool_call>{"name": "now"}</tool_call>'
    assert joined(every_cut("hermes", text, hidden=hidden)) == [ContentDelta("ab"), *call("{}", "now")]


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.opens and f.messages is None])
def test_a_cut_answer_shows_no_piece_of_a_mark(name: str) -> None:
    for opening in FORMATS[name].opens:
        for length in range(2, len(opening)):
            parser = OutputParser(FORMATS[name], TOOLS)
            deltas = merged(parser.feed("Hi " + opening[:length]) + parser.finish(cut=True))
            assert "".join(d.text for d in deltas if isinstance(d, ContentDelta)).rstrip() == "Hi", opening


def test_a_complete_answer_shows_what_only_looks_like_a_mark() -> None:
    for cut, text in ((False, "Hi <tool_"), (True, "Hi <"), (True, "Hi <b")):
        parser = OutputParser(FORMATS["hermes"], TOOLS)
        assert merged(parser.feed(text) + parser.finish(cut=cut)) == [ContentDelta(text)]


def test_arguments_stream_while_they_are_written() -> None:
    parser = OutputParser(FORMATS["qwen3-coder"], TOOLS)
    first = parser.feed("<tool_call><function=get><parameter=city>\nSome lo")
    assert joined(first) == call('{"city": "Some lo')
    assert parser.feed("ng text") == [CallDelta(0, "ng text")]


def test_the_flag_knows_the_formats() -> None:
    assert ("auto", *FORMATS) == settings_of(ServerArgs)["tool_format"].choices


def test_every_template_has_a_format(shared_data: Path) -> None:
    """A format is detected, or plain for a template that shows neither calls nor reasoning."""
    found: dict[str, list[str]] = {}
    for path in sorted((shared_data / "chat_templates").glob("*/*.jinja")):
        found.setdefault(detect_format(path.read_text()).name, []).append(path.stem)
    for name, paths in sorted(found.items()):
        print(f"{name:18} {', '.join(paths)}")
    signs = ("tool_call", "<think>", "TOOL_CALLS", "python_tag", "functools", "<|channel|>", "tool▁call")
    for stem in found["plain"]:
        (path,) = (shared_data / "chat_templates").glob(f"*/{stem}.jinja")
        assert not any(sign in path.read_text() for sign in signs), stem
    assert len(found) >= 18
