"""parse(render(calls)) == calls for the templates' own rendering of tool calls, however the text is cut."""

from __future__ import annotations

import codecs
import itertools
import json
import random
from pathlib import Path

import pytest
from tests.text.bfcl import Call, Case, cases, contradicts_itself, rendered, template

from quire.text.output.detect import detect_format
from quire.text.output.formats import CallDelta, Delta, OutputFormat, prompt_opening
from quire.text.output.parser import OutputParser

SEED = 20261121
# Templates that do not show the model's own calls, or only some of them, and why.
NO_CALLS = {
    "HuggingFaceTB-SmolLM3-3B.jinja": "leaves the calls of earlier turns out",
    "LFM2-8B-A1B.jinja": "leaves the calls of earlier turns out",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B.jinja": "renders calls only where content is None, and then the last one",
    "fireworks-ai-llama-3-firefunction-v2.jinja": "asks for variables of Fireworks' own server",
    "google-gemma-2-2b-it.jinja": "no tools",
    "ibm-granite-granite-3.3-2B-Instruct.jinja": "leaves the calls of earlier turns out",
    "llama-cpp-deepseek-r1.jinja": "writes a Jinja generator as JSON, which transformers refuses too",
    "llama-cpp-rwkv-world.jinja": "no tools",
    "microsoft-Phi-3.5-mini-instruct.jinja": "no tools",
}


def calls_of(deltas: list[Delta]) -> list[Call]:
    names: list[str] = []
    arguments: list[str] = []
    for delta in deltas:
        if isinstance(delta, CallDelta):
            if delta.name is not None:
                assert delta.call == len(names)
                names.append(delta.name)
                arguments.append("")
            arguments[delta.call] += delta.arguments
    return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


def parse(format: OutputFormat, case: Case, prompt: str, pieces: list[str]) -> list[Delta]:
    parser = OutputParser(format, case.schemas, opening=prompt_opening(format, prompt))
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    return merged(deltas)


def merged(deltas: list[Delta]) -> list[Delta]:
    """Merge neighbours of one kind: what a client has in the end."""
    result: list[Delta] = []
    for delta in deltas:
        last = result[-1] if result else None
        if isinstance(delta, CallDelta):
            if isinstance(last, CallDelta) and last.call == delta.call and delta.name is None:
                result[-1] = last._replace(arguments=last.arguments + delta.arguments)
                continue
        elif type(last) is type(delta):
            result[-1] = last._replace(text=last.text + delta.text)  # type: ignore[union-attr]
            continue
        result.append(delta)
    return result


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_bfcl_calls_of_every_template(shared_data: Path, every: int) -> None:
    """Parse whole, character by character, and at random cuts; prints figures (-s)."""
    rng = random.Random(SEED)
    chosen = [
        *itertools.islice(cases(shared_data, "simple_python"), 0, 400, every),
        *itertools.islice(cases(shared_data, "parallel"), 0, 200, every),
        *itertools.islice(cases(shared_data, "multiple"), 0, 200, every),
    ]
    odd = [case.name for case in chosen if contradicts_itself(case)]
    print(f"seed {SEED}; {len(odd)} of {len(chosen)} cases contradict their own schemas: {odd}")
    chosen = [case for case in chosen if case.name not in odd]
    without: set[str] = set()
    for path in sorted((shared_data / "chat_templates" / "llama.cpp").iterdir()):
        chat, format = template(path), detect_format(path.read_text())
        count = 0
        for case in chosen:
            turn = rendered(chat, case)
            if turn is None:
                continue
            prompt, text = turn
            count += 1
            whole = parse(format, case, prompt, [text])
            assert calls_of(whole) == list(case.calls), (path.name, format.name, text)
            assert parse(format, case, prompt, list(text)) == whole, (path.name, text)
            cuts = sorted(rng.sample(range(len(text)), min(6, len(text) - 1)))
            pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
            assert parse(format, case, prompt, pieces) == whole, (path.name, pieces)
        print(f"{path.name:55} {format.name:18} {count} of {len(chosen)} cases")
        if not count:
            without.add(path.name)
    assert without == set(NO_CALLS)


@pytest.mark.parametrize("suite", ["simple_python", "parallel"])
def test_every_cut_of_text_and_bytes(shared_data: Path, suite: str) -> None:
    """One case per format, cut in two at every character and at every byte."""
    case = next(c for c in cases(shared_data, suite) if 0 < len(c.calls) < 3)
    seen: set[str] = set()
    for path in sorted((shared_data / "chat_templates" / "llama.cpp").iterdir()):
        format, turn = detect_format(path.read_text()), rendered(template(path), case)
        if turn is None or format.name in seen:
            continue
        prompt, text = turn
        seen.add(format.name)
        whole = parse(format, case, prompt, [text])
        for at in range(len(text) + 1):
            assert parse(format, case, prompt, [text[:at], text[at:]]) == whole, (path.name, at)
        data = text.encode()
        decoder = codecs.getincrementaldecoder("utf-8")()
        assert parse(format, case, prompt, [decoder.decode(bytes([byte])) for byte in data]) == whole
    assert len(seen) > (10 if suite == "simple_python" else 8)
