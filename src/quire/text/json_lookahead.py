"""What may come next in a JSON text that a schema is checked beside (`quire.text.json_watch`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.text.schema_check import SchemaCheck, canonical


@dataclass(frozen=True, slots=True)
class Frame:
    """An object or array that is open. ``schemas`` hold for it whatever else does."""

    schemas: tuple[Any, ...]
    value: dict[str, Any] | list[Any]
    may: tuple[Any, ...] = ()  # schemas of which some hold
    key: str | None = None  # property whose value comes next
    seen: frozenset[str] | None = None  # with `uniqueItems`: the items so far, as `canonical` texts
    options: tuple[Any, ...] | None = None  # values still possible, if the schema lists them
    # What follows from ``schemas`` and ``may`` alone; shared by all states of one object or array.
    known: dict[Any, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class State:
    """``text``: the bytes of the string or the primitive that is being written."""

    frames: tuple[Frame, ...] = ()
    text: bytes | None = None
    is_key: bool = False
    escaped: bool = False
    expects_key: bool = False


class Lookahead:
    """What a schema says of the value or name that comes."""

    def __init__(self, check: SchemaCheck) -> None:
        self._check = check
        self._known: dict[Any, Any] = {}  # `Frame.known` of the value at the top

    def left(self, state: State) -> list[bytes] | None:
        """Return the texts that a name, or an item of `uniqueItems`, may still have; None if they are not listed."""
        frame = state.frames[-1] if state.frames else None
        if (
            frame is not None
            and isinstance(frame.value, dict)
            and (state.is_key or (state.text is None and state.expects_key))
        ):
            if None not in frame.known:
                names = _names(self._check, frame)
                frame.known[None] = None if names is None else {name: _encoded(name) for name in names}
            listed = frame.known[None]
            if frame.options is not None:
                listed = {name: _encoded(name) for option in frame.options for name in option}
            return None if listed is None else [text for n, text in listed.items() if n not in frame.value]
        values = self.listed(state)
        if values is None or any(isinstance(option, list | dict) for option in values):
            return None
        seen = () if frame is None else frame.seen or ()
        return [_encoded(o) for o in values if not seen or canonical(o) not in seen]

    def listed(self, state: State) -> list[Any] | None:
        """Return the values that may come here, if the schema lists them; those that break it are left out."""
        frame = state.frames[-1] if state.frames else None
        place = None if frame is None else frame.key if isinstance(frame.value, dict) else len(frame.value)
        if frame is not None and frame.options is not None:
            if isinstance(frame.value, dict):
                return [option[place] for option in frame.options if place in option]
            return [option[place] for option in frame.options if len(option) > len(frame.value)]
        known = self._known if frame is None else frame.known
        if ("listed", place) not in known:
            schemas = self.schemas(state)
            known["listed", place] = self._check.listed(schemas)
        values: list[Any] | None = known["listed", place]
        return values

    def is_unique(self, schemas: Sequence[Any]) -> bool:
        return any(part.get("uniqueItems") is True for s in schemas for part in self._check.parts(s))

    def schemas(self, state: State, *, options: bool = False) -> tuple[Any, ...]:
        """Return what holds, or with ``options`` may hold, for the value that comes."""
        if not state.frames:
            return (self._check.root,)
        frame = state.frames[-1]
        place = (frame.key or "") if isinstance(frame.value, dict) else len(frame.value)
        inner: tuple[Any, ...] | None = frame.known.get((place, options))
        if inner is None:
            schemas = frame.may if options else frame.schemas
            inner = frame.known[place, options] = self._check.inside(schemas, place, options=options)
        return inner


def narrowed(outer: tuple[Frame, ...], frame: Frame) -> State | None:
    """Return the state inside ``frame``, with the options that go on as its value begins; None if none does."""
    if frame.options is not None:
        frame = replace(frame, options=tuple(o for o in frame.options if _begins(frame.value, o)))
        if not frame.options:
            return None
    return State((*outer, frame))


def _begins(value: Any, complete: Any) -> bool:
    if isinstance(value, list):
        return canonical(value) == canonical(complete[: len(value)])
    return canonical(value) == canonical({name: complete[name] for name in value if name in complete})


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _names(check: SchemaCheck, frame: Frame) -> set[str] | None:
    """Return the names that an object may take, None if they are not listed."""
    for schema in frame.schemas:
        for part in check.parts(schema):
            if _lists_names(part):
                return set(part.get("properties", ()))
    names: set[str] = set()
    closed = False
    for part in (part for schema in frame.may for part in check.options(schema)):
        if _lists_names(part):
            closed = True
            names |= set(part.get("properties", ()))
        elif "properties" in part or "patternProperties" in part:
            return None
    return names if closed else None


def _lists_names(part: Mapping[str, Any]) -> bool:
    return part.get("additionalProperties") is False and not part.get("patternProperties")


def name_fits(check: SchemaCheck, schema: Any, name: str, before: Mapping[str, Any]) -> bool:
    """Return whether an object may have this name beside those before. Rejects what nothing later can mend."""
    names = {*before, name}
    for part in check.parts(schema):
        if not check.valid(name, part.get("propertyNames", True)):
            return False
        if len(names) > part.get("maxProperties", len(names)):
            return False
        if _only_requires(part.get("not")) and names >= set(part["not"]["required"]):
            return False
        options = part.get("oneOf") or ()
        if all(map(_only_requires, options)) and sum(names >= set(o["required"]) for o in options) > 1:
            return False
    return True


def _only_requires(schema: Any) -> bool:
    return isinstance(schema, Mapping) and isinstance(schema.get("required"), list) and schema.keys() <= {
        "required", "title", "description", "$comment",
    }  # fmt: skip
