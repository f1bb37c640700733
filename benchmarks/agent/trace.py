"""What an agent sends: two conversations, whose histories go to either API.

The agent's first message is a task; the model must answer with a call of a tool, whose result is the next message.
Every fourth answer is text, and the next message a new task. The files that the tool reads are Python's own. The second
conversation is a chat without tools.

The history is the client's: it holds what the server answered, as the server wrote it. With ``thinks`` the client adds
thinking to each of its past answers, which the template drops once a new task begins.
"""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

FILES = sorted(p.name for p in islice(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")), 60))
PARAMETERS = {
    "type": "object",
    "properties": {"path": {"type": "string", "enum": FILES}, "lines": {"type": "string", "enum": ["all", "head"]}},
    "required": ["path", "lines"],
    "additionalProperties": False,
}  # fmt: skip
DESCRIPTION = "Read a file of the project and return its text."
AGENT_SYSTEM = "You maintain a large Python project. Read before you change anything, and change little. " * 8
CHAT_SYSTEM = "You answer questions about Python in a few sentences. " * 6
TURNS_PER_TASK = 4
MAX_TOKENS = {"agent": 64, "chat": 24}


@dataclass(frozen=True, slots=True)
class Answered:
    """What the server answered, of either API."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # name, arguments as JSON
    token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: float = 0.0

    @property
    def shown(self) -> tuple[object, ...]:
        """What a reader sees."""
        return self.text, self.calls


@dataclass(slots=True)
class Conversation:
    """One conversation; its messages in OpenAI's form, from which those of Anthropic's are made."""

    name: str
    result_chars: int  # characters of each message
    thinks: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_turns: int = 0

    def say(self) -> None:
        """Add the next message of the user or of the tool."""
        if not self.messages:
            system = AGENT_SYSTEM if self.has_tools else CHAT_SYSTEM
            self.messages.append({"role": "system", "content": system})
        last = self.messages[-1]
        if last.get("tool_calls"):
            (call,) = last["tool_calls"]
            content = _file(self.num_turns, self.result_chars)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        else:
            task = f"Task {self.num_turns} of the {self.name}: what does this do?\n"
            self.messages.append(
                {"role": "user", "content": task + _file(7 * self.num_turns + 3, self.result_chars)}
            )

    @property
    def has_tools(self) -> bool:
        return self.name == "agent"

    @property
    def wants_call(self) -> bool:
        return self.has_tools and self.num_turns % TURNS_PER_TASK != TURNS_PER_TASK - 1

    def hear(self, answered: Answered) -> None:
        """Add the answer."""
        message: dict[str, Any] = {"role": "assistant", "content": answered.text or None}
        if self.thinks:
            message["reasoning_content"] = f"Step {self.num_turns}: the next file should tell. " * 6
        if answered.calls:
            message["tool_calls"] = [
                {"id": f"call_{self.num_turns}_{i}", "type": "function", "function": {"name": name, "arguments": text}}
                for i, (name, text) in enumerate(answered.calls)
            ]  # fmt: skip
        self.messages.append(message)
        self.num_turns += 1

    def openai_body(self) -> dict[str, Any]:
        """The body of a chat completion."""
        body: dict[str, Any] = {"messages": list(self.messages), "max_tokens": MAX_TOKENS[self.name]}
        if self.has_tools:
            function = {"name": "read_file", "description": DESCRIPTION, "parameters": PARAMETERS}
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"] = "required" if self.wants_call else "auto"
            body["parallel_tool_calls"] = False
        return {**body, "temperature": 0}

    def anthropic_body(self) -> dict[str, Any]:
        """The body of a message."""
        system, *rest = self.messages
        body: dict[str, Any] = {
            "system": system["content"],
            "messages": [_anthropic(message) for message in rest],
            "max_tokens": MAX_TOKENS[self.name],
        }
        if self.has_tools:
            body["tools"] = [{"name": "read_file", "description": DESCRIPTION, "input_schema": PARAMETERS}]
            choice = (
                {"type": "any", "disable_parallel_tool_use": True} if self.wants_call else {"type": "auto"}
            )
            body["tool_choice"] = choice
        return {**body, "temperature": 0}


def _anthropic(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    if message["role"] == "user":
        return message
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"]:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}
        )  # fmt: skip
    return {"role": "assistant", "content": blocks}


def _file(number: int, num_chars: int) -> str:
    """Return so much of a file, a different piece for each number."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = "".join((folder / FILES[(number + i) % len(FILES)]).read_text(errors="replace") for i in range(6))
    return text[:num_chars]
