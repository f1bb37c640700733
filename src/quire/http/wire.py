"""Wire models: the only pydantic in Quire. A request's types are strict ("5" is not 5), its names are judged.

A model holds the fields that Quire uses; ``fields.toml`` has the names of other servers and clients: other names of
used fields, names without effect here, and names that would change the answer and are refused unless they are null or
neutral. `Ignored` says what becomes of any other name. An absent field and a null field are the same. Ranges of values
are checked later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from quire.errors import RequestError, clip
from quire.http.field_rules import (
    MAX_JUDGED,
    Table,
    Use,
    field_table,
    is_neutral,
    misspelled,
    refused_field,
    unknown_field,
)

# msgpack and the engine hold integers of 64 bits.
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def as_integer(value: Any) -> Any:
    """JSON has one type of number: 5.0 is an integer, as in JSON Schema."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list) and float in set(map(type, value)):
        return [as_integer(item) for item in value]
    return value


def as_text(value: Any) -> Any:
    """Return an object as JSON, with its keys in order; anything else unchanged."""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else value


# What an error message says is allowed: the description of a field, or the values of its Literal.
Number = Annotated[float, Strict(), Field(description="a number")]
Integer = Annotated[int, Strict(), Field(description="an integer"), BeforeValidator(as_integer)]
AtLeastOne = Annotated[int, Strict(), Field(description="an integer ≥ 1", ge=1), BeforeValidator(as_integer)]
Int64 = Annotated[
    int,
    Strict(),
    Field(description=f"an integer in {INT64_MIN}…{INT64_MAX}", ge=INT64_MIN, le=INT64_MAX),
    BeforeValidator(as_integer),
]
Boolean = Annotated[bool, Strict(), Field(description="true or false")]
Text = Annotated[str, Strict(), Field(description="a string")]
# Some clients send an object, which stands for its JSON.
User = Annotated[str, Strict(), Field(description="a string"), BeforeValidator(as_text)]
Texts = Annotated[list[str], Field(description="a list of strings")]
TokenIds = Annotated[
    list[Annotated[int, Strict()]],
    Field(description="a list of token ids (integers)"),
    BeforeValidator(as_integer),
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
    fields = sift(body, field_table(model), prefix=prefix, ignored=ignored, in_history=model.in_history)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _type_error(model, error, {**body, **fields}, prefix) from None


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
    fields: dict[str, Any] = {}
    mapped: dict[str, tuple[str, Any]] = {}
    for name, value in body.items():
        rule = table.get(name)
        if rule is None:
            if ignored is None or not _accepts(ignored, name, table, in_history):
                raise unknown_field(name, table, prefix)
            ignored.append(prefix + name)
        elif value is None:
            continue
        elif rule.use is Use.NO_EFFECT:
            if ignored is not None and not in_history:
                ignored.append(prefix + name)
        elif rule.use is Use.USED:
            fields[name] = value
        elif rule.use is Use.MAPPED:
            mapped[rule.used_as] = (name, value)
        elif not is_neutral(rule, value):
            raise refused_field(prefix + name, value, rule)
    for used, (name, value) in mapped.items():
        if fields.setdefault(used, value) != value:
            raise RequestError(
                f"{prefix}{used} = {clip(fields[used])} and {prefix}{name} = {clip(value)}, another name of it, "
                "contradict each other: send one of them.",
                param=prefix + name,
            )
    return fields


def _accepts(ignored: list[str], name: str, table: Table, in_history: bool) -> bool:
    refused = ignored.refused if isinstance(ignored, Ignored) else "none"
    # A body of very many unknown names is no misspelling, and its cost is bounded.
    if refused == "misspelled" and not in_history and len(ignored) < MAX_JUDGED:
        return misspelled(name, [n for n, rule in table.items() if rule.use is Use.USED]) is None
    return refused != "all"


def not_allowed(where: str, value: Any, allowed: str, code: str = "invalid_value") -> RequestError:
    """Return the error for a value that is wrong at ``where``; ``allowed`` completes "it must be"."""
    message = f"{where} = {clip(value)} is not allowed: it must be {allowed}."
    return RequestError(message, param=where, code=code)


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


MAX_NAMES = 20  # in the header
# Paths of one request; the cost of the others is a dictionary lookup.
MAX_KEPT = 1000

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
