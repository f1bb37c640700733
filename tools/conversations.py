"""Real models talk: writes docs/conversations.md from a run of `quire serve` with each of them.

    python -m tools.conversations --transformers ENVIRONMENT/bin/python

The page has what was asked, what came back, and what a reader can check in it. `--transformers` names the Python of an
environment with transformers, gguf and accelerate, which answers the long prompts from the same file's expanded
weights. tests/real/test_conversations.py checks the same facts of today's build.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.real_models import QWEN25_CODER, SMOLLM2, RealModel

from quire.models.wheels import real_models_folder

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "conversations.md"
NEEDLE = "The password of the lighthouse is marmalade."
QUESTION = "What is the password of the lighthouse? Answer with the password alone."
LENGTHS = (2000, 6000)  # tokens of a long prompt, about
MARKS = re.compile(r"<\|[a-z_]+\|>|</?tool_call>")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
Body = Mapping[str, Any]
Answer = Mapping[str, Any]  # a choice of a chat completion


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and what must hold of its answer."""

    title: str
    claim: str
    body: Body
    holds: Callable[[Answer], bool]


def user(text: str, system: str | None = None) -> list[dict[str, str]]:
    """Return the messages of one question."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def text_of(choice: Answer) -> str:
    """Return the text of an answer."""
    return choice["message"]["content"] or ""


def ended(choice: Answer) -> bool:
    """Whether the model ended its turn, and no mark of the template is in its text."""
    return (
        choice["finish_reason"] == "stop"
        and not MARKS.search(text_of(choice))
        and bool(text_of(choice).strip())
    )


def is_person(choice: Answer) -> bool:
    """Whether the text is an object of the schema."""
    value = json.loads(text_of(choice))
    return set(value) == {"name", "age"} and isinstance(value["age"], int) and 0 <= value["age"] <= 130


def calls_weather(choice: Answer) -> bool:
    """Whether the answer is one call of the tool, for the city that was asked about."""
    calls = choice["message"].get("tool_calls") or []
    if len(calls) != 1 or calls[0]["function"]["name"] != "get_weather":
        return False
    return "oslo" in json.loads(calls[0]["function"]["arguments"])["city"].lower()


def schema(messages: list[dict[str, str]]) -> Body:
    """Return a request for an object of the schema."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    return {"messages": messages, "response_format": form}


def cases(model: RealModel) -> list[Case]:
    """Return the short conversations of one model."""
    capital = "Complete the sentence: The capital of France is"
    found = [
        Case("The end of a turn", "The answer ends by itself, and no mark of the template is in it.",
             {"messages": user(capital)}, lambda choice: ended(choice) and "Paris" in text_of(choice)),
        Case("A schema", "The answer is an object of the schema.",
             schema(user("Describe a person: Ada Lovelace, who died at 36. Give JSON with name and age.")), is_person),
    ]  # fmt: skip
    if model is QWEN25_CODER:
        found += [
            Case("A system prompt", "The answer follows the system prompt.",
                 {"messages": user("Who are you?", "You are Nova, an assistant of the harbour of Oslo.")},
                 lambda choice: ended(choice) and "Nova" in text_of(choice)),
            Case("A tool call", "The call is in the model's own form, and is parsed.",
                 {"messages": user("What is the weather in Oslo right now?"), "tools": [WEATHER],
                  "tool_choice": "required", "parallel_tool_calls": False}, calls_weather),
            Case("A tool call of its own accord",
                 "Nothing constrains the answer. It is JSON without marks, in a code block or not, and is parsed.",
                 {"messages": user("What is the weather in Oslo right now?"), "tools": [WEATHER]}, calls_weather),
            Case("A turn after a tool", "The model uses what the tool returned.",
                 {"messages": [*user("What is the weather in Oslo right now?"), {
                     "role": "assistant", "content": None, "tool_calls": [{
                         "id": "call_1", "type": "function",
                         "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}]},
                     {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": -3, "sky": "snow"}'}],
                  "tools": [WEATHER]}, lambda choice: ended(choice) and "3" in text_of(choice)),
        ]  # fmt: skip
    else:
        found += [
            Case("A system prompt", "The answer follows the system prompt.",
                 {"messages": user("Who are you?", "You are a pirate named Captain Flint. Say your name."),
                  "max_tokens": 40}, lambda choice: "flint" in text_of(choice).lower()),
            Case("A tool call", "The template has no tools, so the model does not know it; a required call holds.",
                 {"messages": user("What is the weather in Oslo right now?"), "tools": [WEATHER],
                  "tool_choice": "required", "parallel_tool_calls": False}, calls_weather),
        ]  # fmt: skip
    return found


def haystack(num_words: int) -> str:
    """Return prose of these docs with `NEEDLE` in its middle."""
    words: list[str] = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for line in page.read_text().splitlines() if page != PAGE else ():
            if re.match(r"[A-Za-z][a-z]+,? [a-z]", line):  # prose alone
                words += line.split()
    middle = num_words // 2
    return " ".join([*words[:middle], NEEDLE, *words[middle:num_words]])


class Server:
    """A running server of one model."""

    def __init__(self, url: str) -> None:
        self.url = url

    def post(self, path: str, body: Body) -> Any:
        """Return the JSON that the server answers."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def ask(self, body: Body, max_tokens: int = 160) -> Answer:
        """Return the choice of a greedy chat completion."""
        full = {"model": "real", "temperature": 0, "max_tokens": max_tokens, **body}
        choice: Answer = self.post("/v1/chat/completions", full)["choices"][0]
        return choice

    def needle(self, num_tokens: int) -> list[dict[str, str]]:
        """Return the messages of a long prompt of about ``num_tokens``."""
        num_words, messages = num_tokens // 2, user(QUESTION)
        for _ in range(3):  # words of different pages take different numbers of tokens
            messages = user(f"{haystack(num_words)}\n\n{QUESTION}")
            num_words = round(num_words * num_tokens / len(self.tokens(messages)))
        return messages

    def tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a conversation, with the beginning of the answer."""
        found: list[int] = self.post("/tokenize", {"model": "real", "messages": messages})["tokens"]
        return found


@contextmanager
def serving(model: RealModel, *flags: str) -> Iterator[Server]:
    """Serve the file of ``model`` on a free port."""
    file = real_models_folder() / model.file
    command = [sys.executable, "-m", "quire.cli", "serve", str(file), "--port", "0", "--max-model-len", "8192",
               "--served-model-name", "real", *flags]  # fmt: skip
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}
        )
        try:
            for _ in range(1200):
                found = re.search(r"server ready url=(\S+)", Path(log.name).read_text(errors="replace"))
                if found or process.poll() is not None:
                    break
                time.sleep(0.1)
            if not found:
                raise RuntimeError(Path(log.name).read_text(errors="replace")[-2000:])
            yield Server(found[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def by_transformers(python: str, model: RealModel, prompts: list[list[int]]) -> list[str]:
    """Return the greedy answers of transformers, in fp32, to ``prompts``."""
    script = ROOT / "benchmarks" / "peers" / "greedy_transformers.py"
    file = real_models_folder() / model.file
    done = subprocess.run(
        [python, str(script), str(file)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=True,
    )
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answers


def quoted(text: str) -> str:
    """Return text as a quotation of Markdown."""
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())


def shown(case: Case, choice: Answer) -> str:
    """Return one exchange as Markdown."""
    parts = [f"### {case.title}", case.claim]
    for message in case.body["messages"]:
        content = message.get("content") or json.dumps(message.get("tool_calls"))
        parts.append(f"**{message['role']}**\n\n{quoted(content)}")
    calls = choice["message"].get("tool_calls")
    text = json.dumps([call["function"] for call in calls]) if calls else text_of(choice)
    parts.append(f"**answer** (`finish_reason`: `{choice['finish_reason']}`)\n\n{quoted(text)}")
    return "\n\n".join(parts)


def page_of(model: RealModel, python: str) -> str:
    """Return the part of the page about one model."""
    parts = [f"## {model.name}"]
    rows, prompts = [], []
    with serving(model) as server:
        for case in cases(model):
            choice = server.ask(case.body)
            if not case.holds(choice):
                print(f"{model.name}, {case.title}: does not hold: {choice}", file=sys.stderr)
            parts.append(shown(case, choice))
        for length in LENGTHS:
            messages = server.needle(length)
            prompts.append(server.tokens(messages))
            rows.append((len(prompts[-1]), text_of(server.ask({"messages": messages}, max_tokens=16))))
    theirs = by_transformers(python, model, prompts)
    parts.append(
        f"### A needle in a long prompt\n\nProse of these docs with one sentence in its middle: *{NEEDLE}* Then: "
        f"*{QUESTION}* At most 16 tokens.\n\n| prompt, tokens | Quire, the file as it is stored | transformers, "
        "its expansion in fp32 |\n|---|---|---|\n"
        + "\n".join(
            f"| {count:,} | {ours.strip()} | {other.strip()} |"
            for (count, ours), other in zip(rows, theirs, strict=True)
        )
    )
    return "\n\n".join(parts)


HEAD = """\
# Conversations with real models

For those who want to see answers before they run anything. Written by `python -m tools.conversations` from a run of
`quire serve` on files of `make real-models ARGS=--all`, greedy. The line below each title says what to look at, and
`tests/real/test_conversations.py` checks it. Small models say wrong things: what is shown is that templates, ends,
schemas, tool calls and long prompts work; what `transformers` answers to the long prompts is next to them.
"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--transformers", metavar="PYTHON", required=True)
    parser.add_argument("--out", type=Path, default=PAGE)
    asked = parser.parse_args()
    models = (SMOLLM2, QWEN25_CODER)
    asked.out.write_text("\n".join([HEAD, *(page_of(model, asked.transformers) + "\n" for model in models)]))


if __name__ == "__main__":
    main()
