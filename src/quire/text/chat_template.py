"""`ChatTemplate`: messages to a prompt, as Hugging Face transformers renders a model's Jinja template.

A template comes with a download, so it is rendered in Jinja's immutable sandbox, which keeps it from Python's
internals, and its output is capped. The sandbox does not keep it from looping for hours or building a terabyte of text.
Templates that were read and found harmless are listed by hash in ``known_templates.txt``; a server renders any
other template in a helper process, under limits of time and memory (`quire.engine.frontend`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn, TypeVar

from jinja2 import Template, nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.errors import ModelLoadError, RequestError
from quire.text.tokenizer import SpecialTokens, Tokenizer

T = TypeVar("T")
Message = Mapping[str, Any]
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Marks the end of the last message, where the rendered text is cut. Its space shows whether the template trims text.
_CUT = "QUIRE_CONTINUES_HERE "


# Longest prompt that a template may write, in characters.
MAX_OUTPUT_CHARS = 16_000_000


class RaisedByTemplate(TemplateError):
    """The template called `raise_exception(message)`: it rejects these messages."""


class OutputTooLong(TemplateError):
    """The template writes more than `MAX_OUTPUT_CHARS`."""


class ChatTemplate:
    """The chat template of a model; safe to share between threads.

    ``templates`` maps names to Jinja sources. "default" is used, or "tool_use" if there are tools. ``clock`` returns
    the local time for `strftime_now`.
    """

    def __init__(
        self, templates: Mapping[str, str], special: SpecialTokens, clock: Callable[[], datetime]
    ) -> None:
        """Raises `ModelLoadError` for a template with a syntax error."""
        self.sources = dict(templates)
        self.special = special
        self.clock = clock
        self.is_known = known_templates().issuperset(map(_digest, templates.values()))
        self._environment = TemplateEnvironment(clock)
        self._compiled: dict[str, Template] | None = None
        self._variables: dict[str, Any] = dict(special.roles)
        if special.additional:
            self._variables["additional_special_tokens"] = list(special.additional)
        for name, source in self.sources.items():
            # Parsing computes nothing. Compiling also evaluates constants, which may be huge in an unknown template.
            _checked(name, self._environment.parse, source)
        if self.is_known:
            self.compile()

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, clock: Callable[[], datetime], override: str | None = None
    ) -> ChatTemplate:
        """Return the tokenizer's own template, or ``override`` (the text of `--chat-template`)."""
        templates = tokenizer.chat_templates if override is None else {"default": override}
        return cls(templates, tokenizer.special, clock)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the templates; empty for a model without one."""
        return tuple(self.sources)

    def compile(self) -> dict[str, Template]:
        """Compile the templates if that has not been done. Raises `ModelLoadError`."""
        if self._compiled is None:
            compile_source = self._environment.from_string
            self._compiled = {
                name: _checked(name, compile_source, text) for name, text in self.sources.items()
            }
        return self._compiled

    def source(self, has_tools: bool = False, name: str | None = None) -> str:
        """Return the Jinja text that `render` would use."""
        return self.sources[self._choose(has_tools, name)]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> str:
        """Return the prompt for ``messages`` (plain JSON values).

        ``add_generation_prompt``: begin the assistant's answer; None means the template's default.
        ``continue_final_message``: the prompt ends inside the last message, which the model continues.
        ``variables``: further variables (`enable_thinking`, …), which override the tokenizer's tokens.
        Raises `RequestError` where the template rejects the messages, fails on them, or writes too much.
        """
        chosen = self._choose(bool(tools), name)
        chat = []
        for message in messages:
            has_reasoning = not message.keys().isdisjoint(_REASONING_FIELDS)
            chat.append(_with_reasoning_names(message) if has_reasoning else dict(message))
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "add_generation_prompt and continue_final_message are both true: one begins a new answer, the "
                    "other goes on with the last message. Set one of them to false.",
                    param="continue_final_message",
                )
            chat, final_text = _marked(chat)
        context: dict[str, Any] = {"messages": chat, "tools": tools, "documents": documents}
        if add_generation_prompt is not None:
            context["add_generation_prompt"] = add_generation_prompt
        context = _frozen({**self._variables, **context, **(variables or {})})
        text = self._render((self._compiled or self.compile())[chosen], context)
        return _cut(text, final_text) if continue_final_message else text

    def _choose(self, has_tools: bool, name: str | None) -> str:
        if not self.sources:
            raise RequestError(
                "The model has no chat template, so messages cannot become a prompt. Start the server with "
                "--chat-template FILE, or use /v1/completions with a prompt.",
                param="messages",
                code="no_chat_template",
            )
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise RequestError(
                f"The model has no chat template {name!r}. It has: {', '.join(self.sources)}.",
                param="chat_template",
            )
        return name

    def _render(self, template: Template, variables: Mapping[str, Any]) -> str:
        try:
            try:
                return _capped(template, variables)
            except TypeError:
                # transformers passes None for what is absent, and a template that always expects tools fails on it. If
                # it does not get the name at all, it loops over nothing.
                absent = [name for name in ("tools", "documents") if variables[name] is None]
                if not absent:
                    raise
                return _capped(template, {k: v for k, v in variables.items() if k not in absent})
        except RaisedByTemplate as error:
            raise RequestError(
                f"The model's chat template refuses the messages: {error}", param="messages"
            ) from error
        except OutputTooLong as error:
            raise over_limit(str(error)) from error
        except Exception as error:  # a template can fail in any way that Python can
            raise RequestError(
                f"The model's chat template fails on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates, with the settings and additions of Hugging Face transformers.

    Beyond those, a template may change a list that it made itself, as some do to match results with calls.
    """

    # Evaluated when a template is rendered, under limits, but not when it is compiled.
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        del self.globals["lipsum"]  # endless placeholder text
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: clock().strftime(form)
        self.filters["tojson"] = _tojson

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may read ``obj.attr``; what it was given stays immutable."""
        own = type(obj) is list and attr in ("append", "extend", "insert", "pop")
        return own or super().is_safe_attribute(obj, attr, value)


class _FrozenList(list[Any]):
    """A list that the template did not make itself."""


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _frozen(item) for key, item in value.items()}
    return _FrozenList(map(_frozen, value)) if isinstance(value, list | tuple) else value


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@cache
def known_templates() -> frozenset[str]:
    """Return the SHA-256 digests listed in ``known_templates.txt``."""
    lines = (files("quire.text") / "known_templates.txt").read_text().splitlines()
    return frozenset(line.split()[0] for line in lines if line and not line.startswith("#"))


def over_limit(reason: str) -> RequestError:
    """Return the error for a template that needs more than it is allowed."""
    return RequestError(
        f"The model's chat template does not finish within its limits on these messages: {reason}.",
        param="messages",
    )


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def _checked(name: str, work: Callable[[str], T], source: str) -> T:
    """Return ``work(source)``, its errors as `ModelLoadError`."""
    try:
        return work(source)
    except TemplateSyntaxError as error:
        raise ModelLoadError(
            f"The chat template {name!r} does not compile: {error.message} (line {error.lineno}). Give a corrected one "
            "with --chat-template FILE."
        ) from error
    except (RecursionError, MemoryError, TemplateError) as error:
        raise ModelLoadError(f"The chat template {name!r} does not compile: {error!r}.") from error


def _capped(template: Template, variables: Mapping[str, Any]) -> str:
    """Return what ``template`` writes. Raises `OutputTooLong`, and whatever the template raises."""
    written: list[str] = []
    num_chars = 0
    for text in template.generate(variables):
        written.append(text)
        num_chars += len(text)
        if num_chars > MAX_OUTPUT_CHARS:
            raise OutputTooLong(f"its output is longer than {MAX_OUTPUT_CHARS} characters")
    return "".join(written)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> NoReturn:
    raise RaisedByTemplate(str(message))


def _with_reasoning_names(message: Message) -> dict[str, Any]:
    """Return the message with an earlier turn's reasoning under every name that templates use (as transformers 5)."""
    reasoning = next((message[field] for field in _REASONING_FIELDS if message.get(field) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _marked(chat: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the chat with `_CUT` after the text of its last message, and that text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        return [*chat[:-1], {**chat[-1], "content": content + _CUT}], content
    if isinstance(content, Sequence):
        for index in reversed(range(len(content))):
            part = content[index]
            if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                marked = [*content[:index], {**part, "text": part["text"] + _CUT}, *content[index + 1 :]]
                return [*chat[:-1], {**chat[-1], "content": marked}], part["text"]
    raise RequestError(
        "continue_final_message is true but the last message has no text in `content` to go on with.",
        param="continue_final_message",
    )


def _cut(text: str, final_text: str) -> str:
    at = text.rfind(_CUT.strip())
    if at < 0 or final_text.strip() not in text:
        raise RequestError(
            "continue_final_message is true but the model's chat template changes or drops the last message, so it "
            "cannot be continued. Leave it out, or use another --chat-template.",
            param="continue_final_message",
        )
    # A template that trims the message has removed the mark's space and the message's own trailing spaces.
    has_mark = text[at : at + len(_CUT)] == _CUT
    return text[:at] if has_mark else re.sub(r"\s+\Z", "", text[:at])
