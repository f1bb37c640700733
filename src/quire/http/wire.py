"""Wire models: the only pydantic in Quire. A request's types are strict ("5" is not 5), its names are judged.

A model holds the fields that Quire uses; ``fields.toml`` has the names of other servers and clients: other names of
used fields, names without effect here, and names that would change the answer and are refused unless they are null or
neutral. `Ignored` says what becomes of any other name. An absent field and a null field are the same. Ranges of values
are checked later.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from quire.errors import RequestError, clip, nearest

MAX_JUDGED = 100  # unknown names of a request that are compared with those of used fields
MAX_PARAM_CHARS = 200  # of an unknown field's name in an error
# msgpack and the engine hold integers of 64 bits.
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def whole(value: Any) -> Any:
    """JSON has one type of number: 5.0 is an integer, as in JSON Schema."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and float in set(map(type, value)):
        return [whole(item) for item in value]
    return value


def as_text(value: Any) -> Any:
    """Return an object as JSON, with its keys in order; anything else unchanged."""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value


# What an error message says is allowed: the description of a field, or the values of its Literal.
Number = Annotated[float, Strict(), Field(description="a number")]
Integer = Annotated[int, Strict(), Field(description="an integer"), BeforeValidator(whole)]
AtLeastOne = Annotated[int, Strict(), Field(description="an integer ≥ 1", ge=1), BeforeValidator(whole)]
Int64 = Annotated[
    int,
    Strict(),
    Field(description=f"an integer in {INT64_MIN}…{INT64_MAX}", ge=INT64_MIN, le=INT64_MAX),
    BeforeValidator(whole),
]
Boolean = Annotated[bool, Strict(), Field(description="true or false")]
Text = Annotated[str, Strict(), Field(description="a string")]
# Some clients send an object, which stands for its JSON.
User = Annotated[str, Strict(), Field(description="a string"), BeforeValidator(as_text)]
Texts = Annotated[list[str], Field(description="a list of strings")]
TokenIds = Annotated[
    list[Annotated[int, Strict()]],
    Field(description="a list of token ids (integers)"),
    BeforeValidator(whole),
]
AnyObject = Annotated[dict[str, Any], Field(description="an object")]
TypedObject = Annotated[dict[str, Any], Field(description="an object with a type")]
JsonSchema = Annotated[dict[str, Any], Field(description="a JSON schema (an object)")]
Metadata = Annotated[dict[str, str], Field(description="an object of strings")]


class Wire(BaseModel):
    """Base of the wire models: frozen, strict, no name beyond the declared ones."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())
    in_history: ClassVar[bool] = False


class Past(Wire):
    """Base of what a client sends back of earlier answers: what no template reads is ignored, misspelled or not."""

    in_history: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a POST endpoint. ``required``: fields that the endpoint requires though its model does not.

    ``holds``: JSON schemas of fields whose values are checked on their own; a model in one is a reference to it.
    """

    summary: str
    model: type[Wire]
    required: tuple[str, ...] = ()
    holds: Mapping[str, Any] = field(default_factory=dict)


class Use(StrEnum):
    """What Quire does with a field."""

    USED = "used"
    MAPPED = "another name"  # of a used field
    NO_EFFECT = "no effect here"  # accepted: it cannot change this server's answer
    REFUSED = "refused"  # would change the answer and is not supported


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one field. ``neutral`` values of a refused field are accepted, since they ask for nothing."""

    use: Use
    neutral: tuple[Any, ...] = ()
    hint: str = ""  # what to do instead
    used_as: str = ""  # of a mapped field: the used one


Table = Mapping[str, Rule]
Model = TypeVar("Model", bound=Wire)


def parse(model: type[Model], body: Any, *, prefix: str = "", ignored: list[str] | None = None) -> Model:
    """Return the wire value of ``body``, whose path in the request is ``prefix``.

    ``ignored`` collects the paths of fields without effect and judges unknown names. A plain list accepts them all;
    None refuses them all.

    Raises:
        RequestError: a name that is unknown or refused, or a value of the wrong type; ``param`` is its path.
    """
    if not isinstance(body, dict):
        what = f"{prefix.rstrip('.')} = {clip(body)}" if prefix else f"The body {clip(body)}"
        raise RequestError(f"{what} is not allowed: it must be an object.", param=prefix.rstrip(".") or None)
    kept = sift(body, table_of(model), prefix=prefix, ignored=ignored, in_history=model.in_history)
    try:
        return model.model_validate(kept)
    except ValidationError as error:
        raise _type_error(model, error, {**body, **kept}, prefix) from None


def sift(
    body: Mapping[str, Any],
    table: Table,
    *,
    prefix: str = "",
    ignored: list[str] | None = None,
    in_history: bool = False,
) -> dict[str, Any]:
    """Return the used fields that are not null, under their own names. The arguments are those of `parse`.

    Raises:
        RequestError: a field that is refused, an unknown name that ``ignored`` does not accept, or two names of one
            field with different values.
    """
    kept: dict[str, Any] = {}
    mapped: dict[str, tuple[str, Any]] = {}
    for name, value in body.items():
        rule = table.get(name)
        if rule is None:
            if ignored is None or not _accepts(ignored, name, table, in_history):
                raise _unknown(name, table, prefix)
            ignored.append(prefix + name)
        elif value is None:
            continue
        elif rule.use is Use.NO_EFFECT:
            if ignored is not None and not in_history:
                ignored.append(prefix + name)
        elif rule.use is Use.USED:
            kept[name] = value
        elif rule.use is Use.MAPPED:
            mapped[rule.used_as] = (name, value)
        elif not _is_neutral(rule, value):
            raise _refusal(prefix + name, value, rule)
    for used, (name, value) in mapped.items():
        if kept.setdefault(used, value) != value:
            raise RequestError(
                f"{prefix}{used} = {clip(kept[used])} and {prefix}{name} = {clip(value)}, another name of it, "
                "contradict each other: send one of them.",
                param=prefix + name,
            )
    return kept


def _accepts(ignored: list[str], name: str, table: Table, in_history: bool) -> bool:
    refused = ignored.refused if isinstance(ignored, Ignored) else "none"
    # A body of very many unknown names is no misspelling, and its cost is bounded.
    if refused == "misspelled" and not in_history and len(ignored) < MAX_JUDGED:
        return misspelled(name, [n for n, rule in table.items() if rule.use is Use.USED]) is None
    return refused != "all"


@cache
def table_of(model: type[Wire]) -> Table:
    """Return the rule of each name: the model's fields are used, the others are in its and its bases' sections."""
    names = [field.alias or name for name, field in model.model_fields.items()]
    return rules_of([base.__name__ for base in reversed(model.__mro__)], names)


def rules_of(names: Sequence[str], used: Iterable[str]) -> dict[str, Rule]:
    """Return the rules in sections of ``fields.toml``, where later sections win, and those of ``used`` fields."""
    rules: dict[str, Rule] = {}
    for name in names:
        section = sections().get(name, {})
        rules |= {field: Rule(Use.NO_EFFECT) for field in section.get("no_effect", ())}
        for field_name, refused in section.get("refused", {}).items():
            neutral = tuple(refused.get("neutral", ()))
            rules[field_name] = Rule(Use.REFUSED, neutral, refused.get("hint", ""))
    own = {field: Rule(Use.USED) for field in used}
    for name in names:
        for field_name, ours in sections().get(name, {}).get("mapped", {}).items():
            target = next((target for target in ours if target in own), "")
            rules[field_name] = Rule(Use.MAPPED, used_as=target) if target else Rule(Use.REFUSED)
    return rules | own


@cache
def sections() -> Mapping[str, Any]:
    """Return the contents of ``fields.toml``."""
    return tomllib.loads((files("quire.http") / "fields.toml").read_text())


def not_allowed(where: str, value: Any, allowed: str, code: str = "invalid_value") -> RequestError:
    """Return the error for a value that is wrong at ``where``; ``allowed`` completes "it must be"."""
    message = f"{where} = {clip(value)} is not allowed: it must be {allowed}."
    return RequestError(message, param=where, code=code)


def _unknown(name: str, table: Table, prefix: str) -> RequestError:
    return RequestError(
        f"Unknown field {clip(prefix + name)}{nearest(name, table)}. Correct or remove it, or start the server with "
        "--lenient to have unknown fields ignored.",
        param=(prefix + name)[:MAX_PARAM_CHARS],
        code="unknown_parameter",
    )


def _is_neutral(rule: Rule, value: Any) -> bool:
    # 1 == True in Python but not in JSON.
    return any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in rule.neutral)


def _refusal(name: str, value: Any, rule: Rule) -> RequestError:
    allowed = " or ".join(["null", *(clip(n) for n in rule.neutral)])
    hint = f" {rule.hint}" if rule.hint else ""
    return RequestError(
        f"{name} = {clip(value)} is not supported here and would change the answer; only {allowed} is accepted.{hint}",
        param=name,
        code="unsupported_parameter",
    )


def _type_error(
    model: type[Wire], error: ValidationError, body: Mapping[str, Any], prefix: str
) -> RequestError:
    """Name the first wrong field, its value and what is allowed. Union branches in the path are left out."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])
    field = next(f for own, f in model.model_fields.items() if name in (own, f.alias))
    allowed = field.description or _allowed(field.annotation)
    where = prefix + name
    if first["type"] == "missing" and len(first["loc"]) == 1:
        message = f"{where} is required: it must be {allowed}."
        return RequestError(message, param=where, code="missing_required_parameter")
    return not_allowed(where, body.get(name), allowed, "invalid_type")


def _allowed(annotation: Any) -> str:
    """The values of a Literal, or a description; of a union, those of its first member that has any."""
    if get_origin(annotation) is Literal:
        *some, last = map(repr, get_args(annotation))
        return f"{', '.join(some)} or {last}" if some else last
    described = next(
        (note.description for note in get_args(annotation)[1:] if hasattr(note, "description")), ""
    )
    return described or next(filter(None, map(_allowed, get_args(annotation))), "")


MIN_CHARS = 5  # of an unknown name that may be a misspelled one
MAX_EDITS = 2
MAX_NAMES = 20  # in the header
MAX_KEPT = 1000  # paths of one request; the cost of the others is a dictionary lookup

Judged = Literal["all", "misspelled", "none"]
_INDEX = re.compile(r"\[\d+\]")


class Ignored(list[str]):
    """Paths of ignored fields, each once: ``messages[].mood`` stands for every message.

    ``refused`` says which unknown names are refused: all (``--strict-fields``), those that are probably misspelled
    names of used fields, or none (``--lenient``).
    """

    def __init__(self, refused: Judged = "misspelled") -> None:
        super().__init__()
        self.refused: Judged = refused

    def append(self, path: str) -> None:
        """Keep ``path``, up to a limit."""
        if len(self) < MAX_KEPT:
            super().append(path)

    @classmethod
    def of(cls, *, lenient: bool, strict: bool) -> Ignored:
        """Return an empty list under the settings ``--lenient`` and ``--strict-fields``; the latter one wins."""
        return cls("all" if strict else "none" if lenient else "misspelled")

    def header(self) -> list[tuple[bytes, bytes]]:
        """Return the header of the answer that lists the fields; none without any."""
        paths = list(dict.fromkeys(_INDEX.sub("[]", path) for path in self))
        if not paths:
            return []
        more = [f"and {len(paths) - MAX_NAMES} more"] if len(paths) > MAX_NAMES else []
        shown = ", ".join([path[:100] for path in paths[:MAX_NAMES]] + more)
        text = "".join(char if " " <= char <= "~" else "?" for char in shown)
        return [(b"x-quire-ignored-fields", text.encode())]


def misspelled(name: str, used: Iterable[str]) -> str | None:
    """Return the used name that ``name`` is one or two edits away from, the nearest one; else None."""
    if not MIN_CHARS <= len(name) <= 64:
        return None
    letters = set(name)
    near = [
        (edits(name, other), other)
        for other in used
        # An edit changes the length by one at most, and the set of letters by two.
        if abs(len(name) - len(other)) <= MAX_EDITS
        and len(letters.symmetric_difference(other)) <= 2 * MAX_EDITS
    ]
    num_edits, other = min(near, default=(MAX_EDITS + 1, ""))
    return other if num_edits <= MAX_EDITS else None


def edits(a: str, b: str) -> int:
    """Return the number of insertions, deletions, replacements and swaps of neighbours that make ``b`` of ``a``.

    This is the optimal string alignment distance (Damerau 1964).
    """
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, char in enumerate(a):
        row = [i + 1]
        for j, other in enumerate(b):
            row.append(min(last[j + 1] + 1, row[j] + 1, last[j] + (char != other)))
            if i and j and char == b[j - 1] and a[i - 1] == other:
                row[-1] = min(row[-1], before[j - 1] + 1)
        before, last = last, row
    return last[-1]
