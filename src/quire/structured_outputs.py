"""`StructuredOutputsParams`: the form that an answer must have, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError

# Exactly one of these is given.
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The constraint of an output. A wrong value raises `RequestError`, which names the field as in ``param``."""

    json: str | dict[str, Any] | None = None  # a JSON schema, as an object or as its text
    regex: str | None = None  # Rust's regex syntax, the whole output
    choice: Sequence[str] | None = None  # one of these strings
    grammar: str | None = None  # Lark, or GBNF/EBNF ("root ::= …")
    json_object: bool | None = None  # true: any JSON object
    structural_tag: str | dict[str, Any] | None = None  # tags whose content has a form, within free text
    whitespace_pattern: str | None = None  # JSON: a regex for the text between two tokens
    disable_any_whitespace: bool = False  # JSON: no whitespace outside of strings
    # Of JSON: objects that name properties are closed unless the schema says otherwise (`text.closed_objects`), which
    # is the default; false is JSON Schema to the letter.
    disable_additional_properties: bool | None = None
    param: str = "structured_outputs"  # the field's name in the client's request, for errors

    def __post_init__(self) -> None:
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        kinds = [name for name in KINDS if getattr(self, name) is not None]
        if len(kinds) != 1:
            problem = f"has {' and '.join(kinds)}" if kinds else "is empty"
            raise self.wrong(f"{self.param} {problem}: give exactly one of {', '.join(KINDS)}.")
        self._check_types(kinds[0])
        self._check_json_options(kinds[0])

    @property
    def kind(self) -> str:
        """Which of `KINDS` is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def wrong(self, message: str) -> RequestError:
        """Return an error about this field."""
        return RequestError(message, param=self.param)

    def _check_types(self, kind: str) -> None:
        value = getattr(self, kind)
        texts = kind == "choice" and isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        allowed = {
            "json": (isinstance(value, str | dict), "a JSON schema: an object, or a string that holds one"),
            "regex": (isinstance(value, str), "a regular expression (a string)"),
            "choice": (texts and len(value) > 0, "a list of at least one string"),
            "grammar": (isinstance(value, str), "a Lark or EBNF grammar (a string)"),
            "json_object": (value is True, "true (leave it out for free text)"),
            "structural_tag": (isinstance(value, str | dict), "an object, or a string that holds one"),
        }
        fine, what = allowed[kind]
        if not fine:
            raise self.wrong(f"{self.param}: {kind} = {value!r:.80} is not allowed: it must be {what}.")

    def _check_json_options(self, kind: str) -> None:
        if not isinstance(self.disable_any_whitespace, bool):
            raise self.wrong(f"{self.param}: disable_any_whitespace must be true or false.")
        if not isinstance(self.disable_additional_properties, bool | None):
            raise self.wrong(f"{self.param}: disable_additional_properties must be true or false.")
        pattern = self.whitespace_pattern
        if pattern is not None and not isinstance(pattern, str):
            raise self.wrong(f"{self.param}: whitespace_pattern must be a regular expression (a string).")
        if pattern is not None and self.disable_any_whitespace:
            raise self.wrong(
                f"{self.param}: whitespace_pattern and disable_any_whitespace contradict each other: send one."
            )
        if (pattern is not None or self.disable_any_whitespace) and kind not in ("json", "json_object"):
            raise self.wrong(
                f"{self.param}: whitespace_pattern and disable_any_whitespace belong to json and json_object, not to "
                f"{kind}."
            )
        of_schemas = ("json", "json_object", "structural_tag")
        if self.disable_additional_properties and kind not in of_schemas:
            raise self.wrong(
                f"{self.param}: disable_additional_properties belongs to {', '.join(of_schemas)}, not to {kind}."
            )
