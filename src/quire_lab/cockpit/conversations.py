"""`Keeper`: the conversations that a browser keeps, and what is taken of one that it hands back."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from nicegui.element import Element

from quire_lab.cockpit.chat_request import Talk

_MAX_TITLE_CHARS = 60
_MAX_PANES = 2


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a tool call, as it came."""

    index: int = 0
    name: str | None = None
    arguments: str | None = None


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message; of an answer, also what is shown with it and how it ended."""

    role: Literal["user", "assistant"]
    content: str
    think: str = ""
    calls: list[Call] = []
    finish: str | None = None
    max_tokens: int | None = None
    num_tokens: int | None = None


class Conversation(msgspec.Struct, frozen=True):
    """What the browser keeps of a talk."""

    id: str
    title: str
    turns: Annotated[list[list[Turn]], msgspec.Meta(min_length=1, max_length=_MAX_PANES)]
    models: list[str] = []
    system: str = ""
    is_double: bool = False


def conversation_of(talk: Talk) -> dict[str, Any]:
    """Return what is kept of a talk; its title is how it begins."""
    first = next((turn["content"] for turns in talk.turns for turn in turns), "")
    title = " ".join(first.split())
    if len(title) > _MAX_TITLE_CHARS:
        title = title[: _MAX_TITLE_CHARS - 1] + "…"
    return {
        "id": talk.id,
        "title": title or "(empty)",
        "turns": talk.turns,
        "models": talk.models,
        "system": talk.system,
        "is_double": talk.is_double,
    }


def put_back(talk: Talk, saved: Any) -> bool:
    """Make ``talk`` the conversation that a browser has kept; return False where it is none."""
    try:
        conversation = msgspec.convert(saved, Conversation)
    except msgspec.ValidationError:
        return False
    turns: list[list[dict[str, Any]]] = msgspec.to_builtins(conversation.turns)
    talk.id, talk.turns = conversation.id, turns + [[] for _ in range(_MAX_PANES - len(turns))]
    talk.models, talk.system, talk.is_double = (
        list(conversation.models),
        conversation.system,
        conversation.is_double,
    )
    return True


def begin_anew(talk: Talk) -> None:
    """Make ``talk`` a new conversation, with the settings of the one before. An answer that runs keeps its own list."""
    talk.id, talk.turns = secrets.token_hex(8), [[] for _ in range(_MAX_PANES)]


class Keeper(Element, component="keeper.js"):
    """The list of conversations, and the storage of the browser behind it."""

    def __init__(
        self, opened: Callable[[Any], None], restored: Callable[[Any], None], forgotten: Callable[[], None]
    ) -> None:
        """``restored`` gets the conversation that this browser had open when it was last here."""
        super().__init__()
        self.on("opened", lambda event: opened(event.args))
        self.on("restored", lambda event: restored(event.args))
        self.on("forgotten", lambda _: forgotten())

    def save(self, talk: Talk) -> None:
        """Keep the talk, unless nothing was said in it yet."""
        if any(talk.turns):
            self.run_method("save", conversation_of(talk))
        else:
            self.run_method("mark", talk.id)
