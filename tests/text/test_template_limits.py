"""A template cannot hang the server, fill its memory, or leave the sandbox."""

from __future__ import annotations

import time
import tracemalloc
from datetime import datetime

import pytest

from quire.errors import RequestError
from quire.text import ChatTemplate, SpecialTokens
from quire.text.jinja_sandbox import RenderLimits

LIMITS = RenderLimits(num_chars=100_000, num_steps=50_000)
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDS = "{% endfor %}" * 3
DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = DOUBLED %}{% endfor %}"

GREEDY = {
    "empty loops": LOOPS + ENDS,
    "loops that write": LOOPS + "text" + ENDS,
    "loops that print": LOOPS + "{{ a }}" + ENDS,
    "loops with a filter": LOOPS.replace("99999) %}", "99999) if true %}") + ENDS,
    "a loop that is only counted": "{% for a in range(99999) %}{{ loop.length }}{% endfor %}",
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
    "indent": "{{ ('\\n' * 9999) | indent('b' * 9999) }}",
    "a deep indent": "{{ 'a\\nb' | indent(10000000000) }}",
    "wordwrap": "{{ ('a' * 9999) | wordwrap(1, true, 'b' * 9999) }}",
    "batch": "{{ [1] | batch(10000000000, 0) | list }}",
    "slice": "{{ [1] | slice(10000000000) | list }}",
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


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_templates_are_refused_soon_and_cheaply(name: str) -> None:
    template = ChatTemplate({"default": GREEDY[name]}, SpecialTokens(), datetime.now, LIMITS)
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(RequestError, match="chat template"):
            template.render([])
        took, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took < 10, "seconds of CPU, traced"
    assert peak < 64e6, "bytes"


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{% set ns = namespace(__class__=1) %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ messages | map(attribute='__class__') | list | first | attr('mro') }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_python_is_out_of_reach(source: str) -> None:
    template = ChatTemplate({"default": source}, SpecialTokens(), datetime.now)
    try:
        text = template.render([{"role": "user"}])
    except RequestError:
        return
    assert text == "", "an unsafe attribute is undefined, and prints nothing"


def test_ordinary_long_conversations_are_well_within_the_limits() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content | trim }}{% else %}<|bot|>{{ m.content }}"
        "{% endif %}{% if loop.last %}end{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "word " * 200},
        {"role": "assistant", "content": "word " * 200},
    ] * 2000
    text = ChatTemplate({"default": source}, SpecialTokens(), datetime.now).render(messages)
    assert len(text) > 3_900_000
