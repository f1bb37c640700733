"""An agent's turns (`make agent`): how much of a growing conversation a server computes again, per turn.

    python -m benchmarks.agent.run                    # writes benchmarks/results/agent.md
    python -m benchmarks.agent.run --models hybrid --turns 4
    python -m benchmarks.agent.run --keep DIR --llama-server FILE --gguf hybrid=FILE

Two conversations take turns (`benchmarks.agent.trace`), through OpenAI's chat and through Anthropic's messages, on a
hybrid with random weights (`make_checkpoint.py qwen3.5-tiny`) and on SmolLM2 (`make real-models`). Each server runs
twice: with a cache in which both conversations fit, and with half of it. A server without a prefix cache gives the
streams to compare with, and what a prompt costs to compute.

A turn's *new* tokens are those behind the longest prefix that its prompt shares with anything sent or generated before:
no cache can do with fewer. *Again* is what was computed beyond them.

``--keep``: each run lies in a file of this folder, and one that is there is not run again. ``--llama-server``:
llama.cpp's server runs the same trace, with the checkpoint of ``--gguf`` (its own `convert_hf_to_gguf.py`).
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
from benchmarks.agent.llama_server import LlamaServer, ask_llama, rendered_by_llama
from benchmarks.agent.trace import Answered, Conversation
from benchmarks.make_checkpoint import make

from quire_lab.bench.profile_serving import LiveServer

TEMPLATE = Path(__file__).with_name("template.jinja")
REPORT = Path("benchmarks/results/agent.md")
REAL_MODELS = Path.home() / ".cache/quire/real-models"
BLOCK = 16
# Of the agent and of the chat: characters of each message, so that 20 turns come to 30k tokens, or to 8k.
CHARS = {"hybrid": (5200, 700), "smollm2": (980, 250)}
LENGTHS = {"hybrid": 34000, "smollm2": 8192}
HEADER = (
    "| run | prompt at the end | streams equal | again: most in a turn | of all | of the changed tail, most | "
    "first token beyond new: most, median | turns beyond 0.5 s | checkpoints |",
    "|---|---|---|---|---|---|---|---|---|",
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

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Return the run that ``json.dumps(asdict(run))`` wrote."""
        stored = json.loads(text)
        turns = []
        for turn in stored["turns"]:
            answered = turn["answered"]
            calls = tuple((name, arguments) for name, arguments in answered["calls"])
            ids = tuple(answered["token_ids"])
            answered = Answered(**(answered | {"calls": calls, "token_ids": ids}))
            turns.append(Turn(turn["name"], tuple(turn["prompt"]), answered, turn["num_new"]))
        return cls(stored["title"], turns, stored["metrics"])


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
    ask, render = APIS[api]
    conversations = Conversation("agent", chars[0], thinks), Conversation("chat", chars[1], thinks)
    known, turns = Known(), []
    for _ in range(num_turns):
        for one in conversations:
            one.say()
            prompt, answered = render(client, one), ask(client, one)
            assert answered.prompt_tokens == len(prompt), "the two forms of the history differ"
            turns.append(Turn(one.name, prompt, answered, len(prompt) - known.shared(prompt)))
            known.add([*prompt, *answered.token_ids])
            one.hear(answered)
    return turns


def rendered(client: httpx.Client, one: Conversation) -> tuple[int, ...]:
    """Return the token ids of the prompt."""
    answer = client.post("/v1/chat/completions/render", json=one.openai_body()).raise_for_status()
    return tuple(answer.json()["prompt_token_ids"])


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


@dataclass(frozen=True, slots=True)
class Series:
    """The runs of one model: what they have in common."""

    model: str
    path: Path
    num_turns: int
    keep: Path | None = None
    num_threads: int = 0  # of each server; 0: what it takes by itself

    def run(self, title: str, api: str, server: AbstractContextManager[str], *, thinks: bool) -> Run:
        """Return a run of all turns through a server of its own, or the one that was kept."""
        name = f"{self.model} {self.num_turns} {title} {api}.json".replace(" ", "-").replace(",", "")
        file = self.keep / name if self.keep else None
        if file and file.exists():
            return Run.from_text(file.read_text())
        with server as url, httpx.Client(base_url=url, timeout=600) as client:
            turns = converse(client, api, self.model, self.num_turns, thinks=thinks)
            run = Run(f"{title}, {api}", turns, _metrics(client.get("/metrics").text))
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(asdict(run)))
        most = max(turn.num_again for turn in run.turns)
        print(f"{self.model}: {run.title}: {len(run.turns)} turns, {most} again", flush=True)
        return run

    def quire(self, title: str, api: str, flags: Sequence[object], *, thinks: bool) -> Run:
        """Return a run through `quire serve`."""
        arguments = [str(self.path), "--port", "0", "--chat-template", str(TEMPLATE)]
        arguments += ["--tool-format", "hermes", "--max-num-seqs", "2", *map(str, flags)]
        arguments += ["--threads", str(self.num_threads)] * bool(self.num_threads)
        return self.run(title, api, QuireServer(arguments), thinks=thinks)

    def llama(self, title: str, tool: Path, gguf: Path, flags: Sequence[object], *, thinks: bool) -> Run:
        """Return a run through llama.cpp's server."""
        arguments = [str(tool), "-m", str(gguf), "--chat-template-file", str(TEMPLATE), *map(str, flags)]
        arguments += ["-t", str(self.num_threads)] * bool(self.num_threads)
        return self.run(title, "llama.cpp", LlamaServer(arguments), thinks=thinks)


class QuireServer:
    """`quire serve` for the time of a ``with`` block, which gets its address."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._server = LiveServer(arguments)

    def __enter__(self) -> str:
        return self._server.__enter__().url

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()


def _metrics(text: str) -> dict[str, float]:
    """Return the metrics without labels but the model's, by name."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("quire:")]
    return {name.split("{")[0].removeprefix("quire:"): float(value) for name, value in lines}


def measure(series: Series, llama: tuple[Path, Path] | None) -> Iterator[str]:
    """Yield the rows of the report; ``llama``: llama.cpp's server and the checkpoint for it."""
    for thinks in (False, True):
        drops, length = "drops thinking" if thinks else "keeps all", LENGTHS[series.model]
        flags: list[object] = ["--no-prefix-caching", "--max-model-len", length]
        plain = series.quire(f"{drops}, no cache", "openai", flags, thinks=thinks)
        ends = {turn.name: len(turn.prompt) for turn in plain.turns}
        longest, whole = min(max(ends.values()) + 128, length), sum(ends.values()) // BLOCK + 64
        half = max(whole // 2, longest // BLOCK + 4)
        for what, blocks in (("all fits", whole), ("half fits", half)):
            flags = ["--num-kv-blocks", blocks, "--max-model-len", longest]
            for api in ("openai", "anthropic"):
                yield _row(series.quire(f"{drops}, {what}", api, flags, thinks=thinks), plain)
        for num_slots, ram in ((2, 8192), (1, 0)) if llama else ():
            flags = ["-np", num_slots, "-c", num_slots * length, "--cache-ram", ram]
            title = f"{drops}, {num_slots} slots, {ram // 1024} GiB of other prompts"
            yield _row(series.llama(title, *llama, flags, thinks=thinks), plain)


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
        f"{late[-1]:.2f} s, {late[len(late) // 2]:.2f} s | {sum(s > 0.5 for s in late)} | {held} |"
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


APIS: dict[
    str,
    tuple[
        Callable[[httpx.Client, Conversation], Answered],
        Callable[[httpx.Client, Conversation], tuple[int, ...]],
    ],
] = {
    "openai": (ask_openai, rendered),
    "anthropic": (ask_anthropic, rendered),
    "llama.cpp": (ask_llama, rendered_by_llama),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", choices=sorted(CHARS), default=sorted(CHARS))
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--keep", type=Path, help="folder of runs")
    parser.add_argument("--threads", type=int, default=0, help="of each server")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--gguf", nargs="*", default=[], help="MODEL=FILE")
    options = parser.parse_args()
    ggufs = dict(pair.split("=", 1) for pair in options.gguf)
    when = f"{datetime.date.today()}, {options.turns} turns per conversation."
    lines = ["# An agent's turns", "", __doc__ or "", when]
    for model in options.models:
        path = REAL_MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
        path = make("qwen3.5-tiny", options.out) if model == "hybrid" else path
        gguf = ggufs.get(model, path if path.suffix == ".gguf" else "")
        llama = (options.llama_server, Path(gguf)) if options.llama_server and gguf else None
        lines += ["", f"## {path.name}", "", *HEADER]
        for row in measure(Series(model, path, options.turns, options.keep, options.threads), llama):
            lines.append(row)
            options.report.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
