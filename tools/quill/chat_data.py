"""Chat-formatted training text made from the novels themselves, so that ``<|end|>`` and the roles are learned.

Two kinds, both verbatim words of the novels:

- *dialogue*: a run of consecutive paragraphs that each open with a quotation mark is a conversation; the spoken words
  of each paragraph become one turn, user and assistant in alternation;
- *continuation*: a narrative paragraph is the user's turn and the next paragraph the assistant's.

Quill is a base model: this teaches it the *format* of a chat, not to follow instructions.
"""

from __future__ import annotations

import random
import re

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a character in an old novel.",
    "You are Quill, a small model that has read eighty-three novels.",
    "Answer briefly.",
)
MAX_TURNS = 12
MAX_TURN_CHARS = 1200
_SPOKEN = re.compile(r'"([^"]+)"')


def paragraphs(document: str) -> list[str]:
    """Paragraphs with their line wraps undone; empty when the document does not mark them by blank lines."""
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n", document)]
    parts = [part for part in parts if part]
    if len(parts) < 200 or sorted(map(len, parts))[len(parts) // 2] > 1500:
        return []
    return parts


def chat_conversations(document: str, rng: random.Random) -> list[str]:
    """Conversations of one novel as text with the special tokens, without ``<|bos|>``."""
    parts = paragraphs(document.replace("\u201c", '"').replace("\u201d", '"'))
    conversations: list[str] = []
    run: list[str] = []
    for index, part in enumerate([*parts, ""]):
        spoken = " ".join(words.strip() for words in _SPOKEN.findall(part)) if part.startswith('"') else ""
        if 1 < len(spoken) <= MAX_TURN_CHARS and len(run) < MAX_TURNS:
            run.append(_tidy_end(spoken))
            continue
        if len(run) >= 2:
            conversations.append(_render(run, rng))
        run = []
        following = parts[index + 1] if index + 1 < len(parts) else ""
        if rng.random() < 0.04 and _is_narrative(part) and _is_narrative(following):
            conversations.append(_render([part, following], rng))
    return conversations


def _tidy_end(spoken: str) -> str:
    """A speech that a narrator cut short ends in a comma: end it as a sentence."""
    return spoken[:-1] + "." if spoken.endswith(",") else spoken


def _is_narrative(part: str) -> bool:
    return 80 <= len(part) <= MAX_TURN_CHARS and '"' not in part and part[-1] in ".!?"


def _render(turns: list[str], rng: random.Random) -> str:
    system = f"<|system|>{rng.choice(SYSTEM_PROMPTS)}<|end|>" if rng.random() < 0.25 else ""
    turns = turns[: len(turns) // 2 * 2]
    roles = ("<|user|>", "<|assistant|>")
    return system + "".join(f"{roles[i % 2]}{turn}<|end|>" for i, turn in enumerate(turns))
