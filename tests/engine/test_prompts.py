"""Templates that are not known are rendered in a helper process: none can hang the server or fill its memory."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from tests.engine.toy import byte_tokenizer

from quire.engine import helper_pool
from quire.engine.prompts import Prompts
from quire.errors import ModelLoadError, RequestError
from quire.text.chat_template import ChatTemplate, known_templates
from quire.text.tokenizer import SpecialTokens

pytestmark = pytest.mark.system

HELLO = [{"role": "user", "content": "Hello"}]
NOON = datetime(2025, 7, 10, 12, 0, 0)
ECHO = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDS = "{% endfor %}" * 3
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = DOUBLED %}{% endfor %}"

GREEDY = {
    "two macros that call each other": (
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}"
    ),
    "a list of a list, printed": (
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"
    ),
    "empty loops": LOOPS + ENDS,
    "loops that write": LOOPS + "text" + ENDS,
    "loops that print": LOOPS + "{{ a }}" + ENDS,
    "loops with a filter": LOOPS.replace("99999) %}", "99999) if true %}") + ENDS,
    "loops that are only counted": LOOPS + "{{ loop.length }}" + ENDS,
    "doubling with +": DOUBLING.replace("DOUBLED", "ns.x + ns.x"),
    "doubling with ~": DOUBLING.replace("DOUBLED", "ns.x ~ ns.x"),
    "doubling a list": DOUBLING.replace("DOUBLED", "ns.x + ns.x").replace("'ab'", "[1]"),
    "doubling in a block": (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}"
    ),
    "multiplied text": "{{ 'a' * 10000000000 }}",
    "multiplied from the left": "{{ 10000000000 * 'a' }}",
    "a multiplied list": "{{ ([0] * 10000000000) | length }}",
    "a power": "{{ 10 ** 10000000 }}",
    "a product of numbers": "{% set ns = namespace(x=2**90000) %}{{ ns.x * ns.x }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a format with a star": "{{ '%*d' % (9999999999, 1) }}",
    "the format filter": "{{ '%9999999999d' | format(1) }}",
    "str.format": "{{ '{:9999999999}'.format(1) }}",
    "str.format with a computed width": "{{ '{:{}}'.format(1, '9999999999') }}",
    "format_map": "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
    "center": "{{ 'a' | center(10000000000) }}",
    "str.center": "{{ 'a'.center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ ('\\t' * 9999).expandtabs(1000000) }}",
    "replace": "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "str.replace": "{{ ('a' * 9999).replace('', 'b' * 9999) }}",
    "join": "{{ ([('a' * 9999)] * 9999) | join }}",
    "join with a long separator": "{{ range(9999) | list | join('b' * 9999) }}",
    "str.join": "{{ ('b' * 9999).join(['a'] * 9999) }}",
    "indent": "{{ ('\\nx' * 9999) | indent('b' * 9999) }}",
    "a deep indent": "{{ 'a\\nb' | indent(10000000000) }}",
    "wordwrap": "{{ ('a' * 9999) | wordwrap(1, true, 'b' * 9999) }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list }}",
    "slice": "{{ [messages] | slice(10000000000) | list }}",
    "slice of a constant, while it is compiled": "{{ [1] | slice(10000000000) | list }}",
    "tojson": "{{ {'a': 1} | tojson(indent=10000000000) }}",
    "a macro that calls itself": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a macro tree": (
        "{% macro f(n) %}{% if n > 0 %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "a recursive loop": (
        "{% set ns = namespace() %}{% set ns.x = [1, 2] %}"
        "{% for a in ns.x recursive %}{% if loop.depth < 60 %}{% set b = loop(ns.x) %}{% endif %}{% endfor %}"
    ),
    "a long range": "{{ range(10000000000) | list }}",
    "lipsum": "{{ lipsum(n=100000) }}",
}


@pytest.fixture
def made() -> Iterator[list[Prompts]]:
    prompts: list[Prompts] = []
    yield prompts
    for each in prompts:
        each.close()


def prompts_of(made: list[Prompts], source: str, **roles: str) -> Prompts:
    template = ChatTemplate({"default": source}, SpecialTokens(roles=roles), lambda: NOON)
    assert not template.is_known
    made.append(Prompts(byte_tokenizer(), template))
    return made[-1]


# Compiling has the limit of a start, 20 s on a busy machine.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("constant" in name)) for name in GREEDY]
)
def test_greedy_templates_fail_soon_and_cheaply(
    name: str, made: list[Prompts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_pool, "TASK_LIMIT_S", 0.4)
    monkeypatch.setattr(helper_pool, "MEMORY_LIMIT_BYTES", 1 << 28)
    tracemalloc.start()
    started = time.process_time()
    try:
        prompts = prompts_of(made, GREEDY[name])
        with pytest.raises(RequestError, match="chat template"):
            asyncio.run(prompts.chat([]))
        took, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took < 5, "seconds of this process, traced"
    assert peak < 64e6, "bytes of this process"


def test_a_hostile_template_delays_no_one_else(made: list[Prompts], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_pool, "TASK_LIMIT_S", 1.0)
    source = "{% if messages[0].content == 'loop' %}" + LOOPS + ENDS + "{% endif %}" + ECHO

    async def run() -> int:
        prompts = prompts_of(made, source)
        await prompts.start()
        bad = asyncio.create_task(prompts.chat([{"role": "user", "content": "loop"}]))
        ticks = 0
        while not bad.done():
            assert (await prompts.chat(HELLO)).text == "[user] Hello"
            ticks += not bad.done()
        with pytest.raises(RequestError, match=r"chat template does not finish.*longer than 1 s") as caught:
            bad.result()
        assert caught.value.param == "messages"
        assert (await prompts.chat(HELLO)).text == "[user] Hello"
        return ticks

    assert asyncio.run(run()) >= 1


def test_a_helper_renders_what_this_process_would(made: list[Prompts]) -> None:
    source = (
        "{{ bos_token }}{{ strftime_now('%d %b') }}{% if tools %}{{ tools | tojson }}{% endif %}{{ x }}"
        + ECHO
    )
    prompts = prompts_of(made, source, bos_token="<s>")
    options: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "é<"}}],
        "add_generation_prompt": True,
    }
    rendered = asyncio.run(prompts.chat(HELLO, **options, x=True))
    options["variables"] = {"x": True}
    assert rendered.text == prompts.chat_template.render(HELLO, **options) == prompts.render(HELLO, **options)
    assert rendered.text.startswith("<s>10 Jul")
    assert rendered.token_ids == prompts.tokenizer.encode(rendered.text, add_special_tokens=False)


def test_the_templates_own_message_crosses(made: list[Prompts]) -> None:
    prompts = prompts_of(made, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="refuses the messages: roles must alternate") as caught:
        prompts.render(HELLO)
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_stops_the_start(made: list[Prompts]) -> None:
    prompts = prompts_of(made, "{{ messages | no_such_filter }}")
    with pytest.raises(ModelLoadError, match=r"does not compile.*no_such_filter"):
        asyncio.run(prompts.start())


def test_a_known_template_starts_no_process() -> None:
    special = SpecialTokens()
    chatml = (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
        "+ '\n'}}{% endfor %}"
    )
    assert not ChatTemplate({"default": chatml}, special, datetime.now).is_known
    none = ChatTemplate({}, special, datetime.now)
    assert none.is_known
    assert len(known_templates()) > 50
    prompts = Prompts(byte_tokenizer(), none)
    asyncio.run(prompts.start())
    assert not prompts.helpers.helpers
