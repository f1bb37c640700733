"""The form of the answer: OpenAI's ``response_format``, vLLM's ``structured_outputs``, and their older names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.api.protocol import GenerationFields
from quire.errors import RequestError
from quire.http.wire import AnyObject, Boolean, JsonSchema, Text, Wire, parse
from quire.structured_outputs import StructuredOutputsParams

# Names that say the same as one field of structured_outputs: vLLM's older ones, then SGLang's.
ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}


class JsonSchemaFormat(Wire):
    """``response_format.json_schema``. The schema holds with and without ``strict``."""

    name: Text
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    strict: Boolean | None = None


class ResponseFormat(Wire):
    """``response_format`` of OpenAI, and vLLM's type structural_tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: AnyObject | None = None
    structures: Annotated[list[Any] | None, Field(description="a list of objects")] = None
    triggers: Annotated[list[Any] | None, Field(description="a list of strings")] = None
    format: AnyObject | None = None


class StructuredOutputs(Wire):
    """``structured_outputs``: checked by `StructuredOutputsParams`, but for the names."""

    json_: Annotated[Any, Field(alias="json")] = None
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: Any = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: Boolean = False
    disable_additional_properties: Boolean = False


def structured_outputs(
    request: GenerationFields, ignored: list[str] | None = None
) -> StructuredOutputsParams | None:
    """Return what the request says of the answer's form; None for free text.

    Raises:
        RequestError: a wrong value, or two fields that both say it; ``param`` is the client's name.
    """
    given = [name for name in ("response_format", "structured_outputs", *ALIASES) if _says(request, name)]
    if len(given) > 1:
        raise RequestError(
            f"{given[0]} and {given[1]} both say what form the answer has: send one of them.", param=given[1]
        )
    pattern = request.guided_whitespace_pattern
    if pattern is not None and given not in (["guided_json"], ["json_schema"]):
        raise RequestError(
            "guided_whitespace_pattern is only allowed with guided_json.", param="guided_whitespace_pattern"
        )
    if not given:
        return None
    name = given[0]
    if name == "response_format":
        return _response_format(request, ignored)
    if name == "structured_outputs":
        said = parse(StructuredOutputs, request.structured_outputs, prefix=f"{name}.", ignored=ignored)
        return StructuredOutputsParams(**said.model_dump(by_alias=True), param=name)
    return StructuredOutputsParams(
        **{ALIASES[name]: getattr(request, name)}, whitespace_pattern=pattern, param=name
    )


def _says(request: GenerationFields, name: str) -> bool:
    value = getattr(request, name)
    free = name == "response_format" and isinstance(value, dict) and value.get("type") == "text"
    return value is not None and not (free and len(value) == 1)


def _response_format(request: GenerationFields, ignored: list[str] | None) -> StructuredOutputsParams | None:
    name = "response_format"
    form = parse(ResponseFormat, request.response_format, prefix=f"{name}.", ignored=ignored)
    _check_belonging(form)
    if form.type == "text":
        return None
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True, param=name)
    if form.type == "structural_tag":
        return StructuredOutputsParams(structural_tag=form.model_dump(exclude_none=True), param=name)
    schema = parse(JsonSchemaFormat, form.json_schema, prefix=f"{name}.json_schema.", ignored=ignored)
    return StructuredOutputsParams(json=schema.schema_, param=f"{name}.json_schema.schema")


def _check_belonging(form: ResponseFormat) -> None:
    """Every part belongs to one type; json_schema has to be there for its own."""
    belongs = {"json_schema": "json_schema", "structures": "structural_tag", "triggers": "structural_tag"}
    for part, kind in {**belongs, "format": "structural_tag"}.items():
        if getattr(form, part) is not None and form.type != kind:
            raise RequestError(
                f"response_format.{part} is only allowed with type {kind!r}, not with {form.type!r}.",
                param=f"response_format.{part}",
            )
    if form.type == "json_schema" and form.json_schema is None:
        raise RequestError(
            "response_format.json_schema is required with type 'json_schema': an object with name and schema.",
            param="response_format.json_schema",
            code="missing_required_parameter",
        )
