"""`OutputPlan`: how the answers of one request are taken apart, and the form that this needs of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.api.answer_form import ToolUse
from quire.api.state import ApiState
from quire.errors import RequestError, clip
from quire.request import SamplingParams
from quire.structured_outputs import StructuredOutputsParams
from quire.text.output.call_grammar import after_reasoning, calls_in_text, form_of, required_calls
from quire.text.output.formats import OutputFormat, prompt_opening
from quire.text.output.parser import OutputParser


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the answers of one request are taken apart; `parser` makes a parser for each of them."""

    format: OutputFormat
    schemas: Mapping[str, Mapping[str, Any]]
    opening: str
    hidden: tuple[str, ...]
    with_reasoning: bool = True  # False: the answer leaves it out
    max_calls: int | None = None  # 1 with parallel_tool_calls = false
    required: bool = False  # the answer is calls alone
    unmarked: bool = False  # calls may lack the format's mark
    # What `timing` says of the answer, once it is known.
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        state: ApiState,
        use: ToolUse,
        prompt: str,
        *,
        hide_special: bool,
        separate_reasoning: bool = True,
        with_reasoning: bool = True,
    ) -> OutputPlan | None:
        """Return how the answer to ``prompt`` (text) is taken apart; None if it is plain text.

        Raises:
            RequestError: there are tools, and the chosen format has no calls.
        """
        format = state.output_format(bool(use.tools))
        if use.schemas and not format.calls_tools:
            raise RequestError(
                f"tools are not supported with --tool-format {format.name}, which has no calls. Start the server with "
                "another one, or send tool_choice = 'none'.",
                param="tools",
            )
        if not use.schemas and format.calls is not None:  # only reasoning is separated
            format = replace(format, opens=(), closes=(), calls=None, bare="")
        if not separate_reasoning:
            format = replace(format, reasoning=None)
        if not format.calls_tools and not format.reasons:
            return None
        hidden = state.frontend.tokenizer.special_texts if hide_special else ()
        opening, max_calls = prompt_opening(format, prompt), None if use.parallel else 1
        return cls(format, use.schemas, opening, hidden, with_reasoning, max_calls, bool(use.required))

    def constrained(
        self, use: ToolUse, form: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """Return the form of the whole answer: the reasoning, then the calls that ``use`` requires, or ``form``.

        Where the model decides and a tool has a grammar, the form is text with calls that keep to it.

        Raises:
            RequestError: both a call and a form are required, or this format's calls cannot be required.
        """
        part: dict[str, Any] | None = None
        param = "tool_choice" if form is None else form.param
        in_reasoning = self.format.reasoning is not None and self.opening == self.format.reasoning[0]
        if use.required:
            # The form is that of an answer without calls, in a later turn.
            param = "tool_choice"
            part = required_calls(self.format, use.enforced, use.required, parallel=use.parallel)
            if part is None:
                raise RequestError(
                    f"tool_choice = {clip(use.choice)} is not supported with the tool format {self.format.name!r} of "
                    "this model; 'auto' and 'none' are.",
                    param="tool_choice",
                )
        elif form is None and use.grammars and (part := calls_in_text(self.format, use.enforced)) is not None:
            param = next(iter(use.grammars.values())).param
        elif form is None or not in_reasoning:
            return form
        else:
            part = form_of(form.kind, getattr(form, form.kind))
            if part is None:
                return form
        if in_reasoning:
            part = after_reasoning(self.format, part)
        to_the_letter = None if use.required or form is None else form.disable_additional_properties
        return StructuredOutputsParams(
            structural_tag={"format": part}, param=param, disable_additional_properties=to_the_letter
        )

    def parser(self) -> OutputParser:
        return OutputParser(
            self.format, self.schemas, opening=self.opening, hidden=self.hidden, unmarked=self.unmarked
        )


def shown_tools(state: ApiState, use: ToolUse) -> list[dict[str, Any]] | None:
    """Return the tools that the template shows.

    They stay in the prompt where they are not to be called, so that it begins as that of the turn before and is found
    in the cache. Where calls have no mark that could be forbidden, a model that is not shown the tools calls none.
    """
    if use.choice == "none" and not state.output_format(True).call_marks:
        return None
    return list(use.tools)


def without_calls(state: ApiState, use: ToolUse, sampling: SamplingParams) -> SamplingParams:
    """Return ``sampling`` with which the marks of calls are not written. Beams have no forbidden words."""
    marks = state.output_format(True).call_marks if use.tools and not sampling.use_beam_search else ()
    return replace(sampling, bad_words=(*sampling.bad_words, *marks))
