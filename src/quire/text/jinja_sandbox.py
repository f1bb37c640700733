"""A Jinja environment for templates that came with a download: sandboxed, and metered so that it cannot hang.

Jinja's `ImmutableSandboxedEnvironment` keeps a template from Python's internals but not from looping for hours or from
building a terabyte of text. Here every loop iteration, call, operator, filter and output is charged to a meter. What
could make a large value in one go is estimated *before* it is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.text.result_size import FILTER_SIZES, METHOD_SIZES, binop_size, brace_format_size

_CHARS_PER_STEP = 64
_STEPS_PER_CALL = 8


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one rendering may cost before it is refused. A step is a loop iteration, an eighth of a call, or 64
    characters made; four million of them take a few seconds at most.
    """

    num_chars: int = 16_000_000  # of the output, and of any single value on the way
    num_steps: int = 4_000_000


class LimitError(TemplateError):
    """The template needs more than `RenderLimits` allows."""


class Meter:
    """What one rendering has left."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._num_steps = limits.num_steps
        self._num_chars = limits.num_chars

    def charge(self, num_steps: int) -> None:
        """Take steps away."""
        self._num_steps -= num_steps
        if self._num_steps < 0:
            raise LimitError(f"it takes more than {self._limits.num_steps} steps")

    def charge_size(self, size: int) -> None:
        """Take away what a value of ``size`` characters or items costs; refuse one that is too large."""
        if size > self._limits.num_chars:
            raise LimitError(
                f"it makes a value of {size} characters or items (at most {self._limits.num_chars})"
            )
        self.charge(size // _CHARS_PER_STEP)

    def charge_output(self, text: str) -> None:
        """Take away what writing ``text`` costs."""
        self._num_chars -= len(text)
        if self._num_chars < 0:
            raise LimitError(f"its output is longer than {self._limits.num_chars} characters")

    def each(self, items: Iterable[Any], cost: int) -> Iterator[Any]:
        """Iterate over ``items``, charging for each."""
        for item in items:
            self.charge(cost)
            yield item


class MeteredContext(Context):
    """A rendering's variables, with its meter."""

    meter: Meter

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """Contexts inside of this one share the meter."""
        context = super().derived(locals)
        assert isinstance(context, MeteredContext)
        context.meter = self.meter
        return context


class SafeNamespace(Namespace):
    """Jinja's `namespace`, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class SafeFormat:
    """The bound `format` or `format_map` of a string, as templates get it."""

    def __init__(self, text: str, function: Callable[..., str]) -> None:
        self.text = text
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        return self._function(*args, **kwargs)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no names that begin with an underscore, as {name!r}")


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@pass_context
def _metered(context: MeteredContext, items: Any, cost: int) -> Iterator[Any]:
    return context.meter.each(iter(items), cost)


@pass_context
def _sized(context: MeteredContext, text: Any) -> Any:
    context.meter.charge_size(len(text))
    return text


@pass_context
def _written(context: MeteredContext, value: Any) -> str:
    text = str(value)
    context.meter.charge_output(text)
    return text


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that its arguments are looked at before it runs and its result is charged."""
    size_of = FILTER_SIZES.get(name)
    passes = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def bounded(context: MeteredContext, *args: Any, **kwargs: Any) -> Any:
        if size_of is not None:
            context.meter.charge_size(size_of(*args, **kwargs))
        context.meter.charge(1)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        given = () if passes is None else (first[passes.name],)
        result = function(*given, *args, **kwargs)
        if isinstance(result, str | list):
            context.meter.charge_size(len(result))
        return result

    return bounded


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in: as Hugging Face's, with a meter."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    context_class = MeteredContext

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], finalize=_written
        )
        self.globals["namespace"] = SafeNamespace
        self.globals["dict"] = _new_dict
        del self.globals["lipsum"]  # endless placeholder text, of no use here
        self.filters["tojson"] = _tojson
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters["_metered"] = _metered
        self.filters["_sized"] = _sized

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, and put the meter into every loop and every `~`."""
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            written = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            loop.iter = self._filtered(loop.iter, "_metered", [nodes.Const(1 + written // _CHARS_PER_STEP)])
        for parent in list(tree.find_all(nodes.Node)):
            for field, value in parent.iter_fields():
                if isinstance(value, nodes.Concat):
                    setattr(parent, field, self._filtered(value, "_sized", []))
                elif isinstance(value, list):
                    value[:] = [
                        self._filtered(item, "_sized", []) if isinstance(item, nodes.Concat) else item
                        for item in value
                    ]
        tree.set_environment(self)
        return tree

    def _filtered(self, node: nodes.Node, name: str, args: list[nodes.Expr]) -> nodes.Filter:
        return nodes.Filter(node, name, args, [], None, None, lineno=node.lineno)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something from a template."""
        assert isinstance(context, MeteredContext)
        meter = context.meter
        meter.charge(_STEPS_PER_CALL)
        if isinstance(function, LoopContext) and args:
            meter.charge(3 * _STEPS_PER_CALL)
            args = (meter.each(iter(args[0]), 1), *args[1:])  # `loop(children)` of a recursive loop
        owner = getattr(function, "__self__", None)
        if isinstance(function, SafeFormat):
            meter.charge_size(brace_format_size(function.text, *args, **kwargs))
        elif isinstance(owner, str):
            size_of = METHOD_SIZES.get(getattr(function, "__name__", ""))
            if size_of is not None:
                meter.charge_size(size_of(owner, *args, **kwargs))
        result = super().call(context, function, *args, **kwargs)
        if isinstance(result, str):
            meter.charge_size(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Let `str.format` reach safe attributes only, as Jinja does, and keep the text for `call` to look at."""
        wrapped = super().wrap_str_format(value)
        return None if wrapped is None else SafeFormat(value.__self__, wrapped)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply `+`, `*`, `**` or `%` after a look at how large the result would be."""
        assert isinstance(context, MeteredContext)
        context.meter.charge_size(binop_size(operator, left, right))
        return super().call_binop(context, operator, left, right)


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


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """`dict(…)` in templates, without the class and its attributes."""
    return dict(*args, **kwargs)


def render(template: Template, variables: Mapping[str, Any], limits: RenderLimits) -> str:
    """Render ``template`` within ``limits``. Raises whatever the template raises, and `LimitError`."""
    context = template.new_context(dict(variables))
    assert isinstance(context, MeteredContext)
    context.meter = Meter(limits)
    written: list[str] = []
    num_chars = 0
    for text in template.root_render_func(context):
        written.append(text)
        num_chars += len(text)
        if num_chars > limits.num_chars:
            raise LimitError(f"its output is longer than {limits.num_chars} characters")
    return "".join(written)
