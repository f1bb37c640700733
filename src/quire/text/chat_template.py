"""`ChatTemplate`: messages to a prompt, as Hugging Face transformers renders a model's Jinja template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from quire.errors import ModelLoadError, RequestError
from quire.text.jinja_sandbox import LimitError, RenderLimits, TemplateEnvironment, render
from quire.text.tokenizer import SpecialTokens, Tokenizer

Message = Mapping[str, Any]
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Marks where the last message ends, so that a rendering can be cut there. The space shows whether the template trims.
_CUT = "QUIRE_CONTINUES_HERE "


class RaisedByTemplate(TemplateError):
    """The template called `raise_exception(message)`: it refuses these messages."""


class ChatTemplate:
    """The chat template of a model, compiled once; safe to share between threads.

    ``templates`` maps names to Jinja sources. "default" is used, or "tool_use" where there are tools. ``clock`` gives
    the local time for `strftime_now`; a test passes a fixed one.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special: SpecialTokens,
        clock: Callable[[], datetime],
        limits: RenderLimits | None = None,
    ) -> None:
        """Raises `ModelLoadError` for a template that does not compile."""
        environment = TemplateEnvironment()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        self._sources = dict(templates)
        self._templates = {name: _compile(environment, name, text) for name, text in templates.items()}
        self._variables: dict[str, Any] = dict(special.roles)
        if special.additional:
            self._variables["additional_special_tokens"] = list(special.additional)
        self._limits = limits or RenderLimits()

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
        return tuple(self._templates)

    def source(self, has_tools: bool = False, name: str | None = None) -> str:
        """Return the Jinja text that `render` would use."""
        return self._sources[self._choose(has_tools, name)]

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

        ``add_generation_prompt``: begin the assistant's answer; None leaves that to the template's own default.
        ``continue_final_message``: the prompt ends inside the last message, which the model goes on with.
        ``variables``: more for the template to see (`enable_thinking`, …); they win over the tokenizer's tokens.
        Raises `RequestError` where the template refuses the messages, fails on them, or costs too much.
        """
        chosen = self._choose(bool(tools), name)
        chat = [_with_reasoning_names(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "add_generation_prompt and continue_final_message are both true: one begins a new answer, the "
                    "other goes on with the last message. Set one of them to false.",
                    param="continue_final_message",
                )
            chat, final_text = _marked(chat)
        given: dict[str, Any] = {"messages": chat, "tools": tools, "documents": documents}
        if add_generation_prompt is not None:
            given["add_generation_prompt"] = add_generation_prompt
        text = self._render(self._templates[chosen], {**self._variables, **given, **(variables or {})})
        return _cut(text, final_text) if continue_final_message else text

    def _choose(self, has_tools: bool, name: str | None) -> str:
        if not self._templates:
            raise RequestError(
                "The model has no chat template, so messages cannot become a prompt. Start the server with "
                "--chat-template FILE, or use /v1/completions with a prompt.",
                param="messages",
                code="no_chat_template",
            )
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                f"The model has no chat template {name!r}. It has: {', '.join(self._templates)}.",
                param="chat_template",
            )
        return name

    def _render(self, template: Template, variables: Mapping[str, Any]) -> str:
        absent = [name for name in ("tools", "documents") if variables[name] is None]
        try:
            try:
                return render(template, variables, self._limits)
            except TypeError:
                # transformers passes None for what is absent, and a template made for tools alone fails on it; one that
                # does not get the name at all loops over nothing.
                if not absent:
                    raise
                fewer = {name: value for name, value in variables.items() if name not in absent}
                return render(template, fewer, self._limits)
        except RaisedByTemplate as error:
            raise RequestError(
                f"The model's chat template refuses the messages: {error}", param="messages"
            ) from error
        except LimitError as error:
            raise RequestError(
                f"The model's chat template does not finish within its limits on these messages: {error}.",
                param="messages",
            ) from error
        except Exception as error:  # a template can fail in any way that Python can
            raise RequestError(
                f"The model's chat template fails on these messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error


def _compile(environment: TemplateEnvironment, name: str, source: str) -> Template:
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ModelLoadError(
            f"The chat template {name!r} does not compile: {error.message} (line {error.lineno}). Give a corrected one "
            "with --chat-template FILE."
        ) from error
    except (RecursionError, MemoryError, TemplateError) as error:
        raise ModelLoadError(f"The chat template {name!r} does not compile: {error!r}.") from error


def _raise_exception(message: Any) -> NoReturn:
    raise RaisedByTemplate(str(message))


def _with_reasoning_names(message: Message) -> dict[str, Any]:
    """Give an earlier turn's reasoning all the names under which templates look for it (as transformers 5)."""
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
    # A template that trims the message has eaten the mark's space, and the message's own trailing spaces.
    kept = text[at : at + len(_CUT)] == _CUT
    return text[:at] if kept else re.sub(r"\s+\Z", "", text[:at])
