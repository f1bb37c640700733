"""An agent's turns (`make agent`): how much of a growing conversation a server computes again, per turn.

    python -m benchmarks.agent.run                    # writes benchmarks/results/agent.md
    python -m benchmarks.agent.run --models hybrid --turns 4

Two conversations take turns (`benchmarks.agent.trace`), through OpenAI's chat and through Anthropic's messages, on a
hybrid with random weights (`make_checkpoint.py qwen3.5-tiny`) and on SmolLM2 (`make real-models`). Each server runs
twice: with a cache in which both conversations fit, and with half of it. A server without a prefix cache gives the
streams to compare with, and what a prompt costs to compute.

A turn's *new* tokens are those behind the longest prefix that its prompt shares with anything sent or generated before:
no cache can do with fewer. *Again* is what was computed beyond them.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from benchmarks.agent.trace import Answered, Conversation
from benchmarks.make_checkpoint import make

from quire_lab.bench.profile_serving import LiveServer

TEMPLATE = Path(__file__).with_name("template.jinja")
REPORT = Path("benchmarks/results/agent.md")
REAL_MODELS = Path.home() / ".cache/quire/real-models"
BLOCK = 16
# Of the agent and of the chat: characters of each message, so that 20 turns come to 30k tokens, or to 8k.
CHARS = {"hybrid": (5200, 700), "smollm2": (1150, 250)}
LENGTHS = {"hybrid": 34000, "smollm2": 8192}
HEADER = (
    "| run | prompt at the end | streams equal | again: most in a turn | of all | of the changed tail, most | "
    "first token beyond new: most, median | checkpoints |",
    "|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as the server answered it."""

    name: str
    prompt: tuple[int, ...]
    answered: Answered
    num_new: int = 0

    @property
    def num_again(self) -> int:
        """Tokens computed beyond the new ones."""
        return len(self.prompt) - self.answered.cached_tokens - self.num_new


@dataclass(slots=True)
class Run:
    """All turns through one API of one server."""

    title: str
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


class Known:
    """All token ids that were sent or generated so far."""

    def __init__(self) -> None:
        self._texts: list[np.ndarray] = []

    def shared(self, prompt: Sequence[int]) -> int:
        """Return the length of the longest prefix of ``prompt`` that begins any of them."""
        ids, best = np.asarray(prompt), 0
        for text in self._texts:
            size = min(len(text), len(ids))
            differs = np.flatnonzero(text[:size] != ids[:size])
            best = max(best, int(differs[0]) if len(differs) else size)
        return best

    def add(self, ids: Sequence[int]) -> None:
        self._texts.append(np.asarray(ids))


def converse(client: httpx.Client, api: str, model: str, num_turns: int, *, thinks: bool) -> list[Turn]:
    """Run both conversations for ``num_turns`` turns each, and return the turns in their order."""
    chars = CHARS[model]
    conversations = Conversation("agent", chars[0], thinks), Conversation("chat", chars[1], thinks)
    known, turns = Known(), []
    for _ in range(num_turns):
        for one in conversations:
            one.say()
            rendered = (
                client.post("/v1/chat/completions/render", json=one.openai_body()).raise_for_status().json()
            )
            prompt = tuple(rendered["prompt_token_ids"])
            answered = ask_openai(client, one) if api == "openai" else ask_anthropic(client, one)
            assert answered.prompt_tokens == len(prompt), "the two forms of the history differ"
            turns.append(Turn(one.name, prompt, answered, len(prompt) - known.shared(prompt)))
            known.add([*prompt, *answered.token_ids])
            one.hear(answered)
    return turns


def ask_openai(client: httpx.Client, one: Conversation) -> Answered:
    """Ask by a streamed chat completion."""
    body = one.openai_body() | {"stream": True, "timing": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True}
    text, ids, calls, last = "", [], {}, {}
    for event in _events(client, "/v1/chat/completions", body):
        for choice in event.get("choices", ()):
            ids += choice.get("token_ids") or []
            text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", ()):
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                calls[call["index"]] = name + (function.get("name") or ""), arguments + function["arguments"]
        last |= {key: event[key] for key in ("usage", "timing") if event.get(key)}
    return _answered(text, tuple(calls.values()), ids, last["timing"])


def ask_anthropic(client: httpx.Client, one: Conversation) -> Answered:
    """Ask by a streamed message."""
    text, calls, last = "", [], {}
    for event in _events(client, "/v1/messages", one.anthropic_body() | {"stream": True, "timing": True}):
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append([event["content_block"]["name"], ""])
        delta = event.get("delta", {})
        text += delta.get("text", "")
        if "partial_json" in delta:
            calls[-1][1] += delta["partial_json"]
        last |= {key: event[key] for key in ("usage", "timing") if key in event}
    return _answered(text, tuple((name, arguments) for name, arguments in calls), [], last["timing"])


def _events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body) as answer:
        if answer.is_error:
            raise SystemExit(f"{path}: {answer.status_code} {answer.read().decode()}")
        data = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def _answered(
    text: str, calls: tuple[tuple[str, str], ...], ids: Sequence[int], timing: dict[str, Any]
) -> Answered:
    counts = timing["prompt_tokens"], timing["cached_tokens"]
    return Answered(text, calls, tuple(ids), *counts, timing["first_token_ms"] / 1e3)


def serve(
    model: str, path: Path, title: str, flags: Sequence[str], apis: Sequence[str], num_turns: int, *, thinks: bool
) -> list[Run]:  # fmt: skip
    """Start a server once per API, and run all turns through it."""
    runs = []
    arguments = [str(path), "--port", "0", "--chat-template", str(TEMPLATE), "--tool-format", "hermes"]
    arguments += ["--max-num-seqs", "2", *flags]
    for api in apis:
        with LiveServer(arguments) as server, httpx.Client(base_url=server.url, timeout=600) as client:
            run = Run(f"{title}, {api}", converse(client, api, model, num_turns, thinks=thinks))
            run.metrics = _metrics(client.get("/metrics").text)
        runs.append(run)
        print(
            f"{model}: {run.title}: {len(run.turns)} turns, {max(t.num_again for t in run.turns)} again",
            flush=True,
        )
    return runs


def _metrics(text: str) -> dict[str, float]:
    """Return the metrics without labels but the model's, by name."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("quire:")]
    return {name.split("{")[0].removeprefix("quire:"): float(value) for name, value in lines}


def measure(model: str, path: Path, num_turns: int) -> Iterator[str]:
    """Yield the rows of the report that are about ``model``."""
    for thinks in (False, True):
        drops = "drops thinking" if thinks else "keeps all"
        flags = ["--no-prefix-caching", "--max-model-len", str(LENGTHS[model])]
        (plain,) = serve(model, path, "no cache", flags, ["openai"], num_turns, thinks=thinks)
        ends = {turn.name: len(turn.prompt) for turn in plain.turns}
        longest, whole = max(ends.values()) + 128, sum(ends.values()) // BLOCK + 64
        half = max(whole // 2, longest // BLOCK + 4)
        for what, blocks in (("all fits", whole), ("half fits", half)):
            flags = ["--num-kv-blocks", str(blocks), "--max-model-len", str(longest)]
            title = f"{drops}, {what}"
            runs = serve(model, path, title, flags, ["openai", "anthropic"], num_turns, thinks=thinks)
            yield from [_row(run, plain) for run in runs]


def _row(run: Run, plain: Run) -> str:
    pairs = zip(run.turns, plain.turns, strict=True)
    same = sum(a.answered.shown == b.answered.shown and a.prompt == b.prompt for a, b in pairs)
    known = Known()
    new = []
    for turn in plain.turns:  # with the ids of both streams, which Anthropic's events do not have
        new.append(len(turn.prompt) - known.shared(turn.prompt))
        known.add([*turn.prompt, *turn.answered.token_ids])
    again = [len(t.prompt) - t.answered.cached_tokens - n for t, n in zip(run.turns, new, strict=True)]
    late = sorted(_beyond(run, plain, new))
    tails = changed_tails(plain.turns)
    worst = max((a / tail for a, tail in zip(again, tails, strict=True) if tail), default=0.0)
    slots, size = run.metrics.get("state_checkpoints", 0), run.metrics.get("state_slot_bytes", 0)
    held = f"{slots:.0f} × {size / 2**20:.2f} MiB" if size else "–"
    end = max(len(turn.prompt) for turn in run.turns)
    return (
        f"| {run.title} | {end:,} | {same}/{len(run.turns)} | {max(again)} | {sum(again):,} | {worst:.2f} × | "
        f"{late[-1]:.2f} s, {late[len(late) // 2]:.2f} s | {held} |"
    )


def changed_tails(turns: Sequence[Turn]) -> list[int]:
    """Return per turn how many tokens at the end of its conversation's last prompt and answer it renders otherwise."""
    before: dict[str, list[int]] = {}
    tails = []
    for turn in turns:
        known = Known()
        known.add(before.get(turn.name, []))
        tails.append(len(before.get(turn.name, [])) - known.shared(turn.prompt))
        before[turn.name] = [*turn.prompt, *turn.answered.token_ids]
    return tails


def _beyond(run: Run, plain: Run, new: Sequence[int]) -> list[float]:
    """Return per turn the time to its first token beyond what its new tokens cost the server without a cache."""
    lengths = np.array([len(turn.prompt) for turn in plain.turns], dtype=float)
    times = np.array([turn.answered.first_token_s for turn in plain.turns])
    cost = np.poly1d(np.polyfit(lengths, times, 2 if len(lengths) > 4 else 1))
    pairs = zip(run.turns, new, strict=True)
    return [t.answered.first_token_s - float(cost(len(t.prompt)) - cost(len(t.prompt) - n)) for t, n in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=sorted(CHARS), default=sorted(CHARS))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--report", type=Path, default=REPORT)
    options = parser.parse_args()
    when = f"{datetime.date.today()}, {options.turns} turns per conversation."
    lines = ["# An agent's turns", "", __doc__ or "", when]
    for model in options.models:
        path = REAL_MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
        path = make("qwen3.5-tiny", options.out) if model == "hybrid" else path
        lines += ["", f"## {path.name}", "", *HEADER]
        for row in measure(model, path, options.turns):
            lines.append(row)
            options.report.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
