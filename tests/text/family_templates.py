"""Chat templates in the manner of families that write calls in a form of their own, written for these tests.

Each shows the tools and renders earlier calls; they differ in how a template can build its marks: as plain text, from
strings that are joined, from constants, in macros.
"""

from __future__ import annotations

_TURNS = """{%- if tools %}<|sys|>Tools: {{ tools | tojson }}
{% endif -%}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|assistant|>{{ message.content or '' }}
{%- if message.tool_calls %}CALLS{% endif %}<|end|>
{%- else %}<|{{ message.role }}|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

_EACH = "{%- for call in message.tool_calls %}{% set f = call.function %}"


def _template(calls: str, before: str = "") -> str:
    return before + _TURNS.replace("CALLS", calls)


def _dsml(bar: str, section: str) -> str:
    """Parameters whose kind the model writes as an attribute; the marks are joined from a constant."""
    calls = (
        f"{{{{ '\\n\\n<' ~ mark ~ '{section}>\\n' }}}}"
        + _EACH
        + """{{ '<' ~ mark ~ 'invoke name="' ~ f.name ~ '">\\n' }}
{%- for key, value in f.arguments.items() %}
{{- '<' ~ mark ~ 'parameter name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') ~ '">' }}
{{- value if value is string else value | tojson }}{{ '</' ~ mark ~ 'parameter>\\n' }}
{%- endfor %}{{ '</' ~ mark ~ 'invoke>\\n' }}{% endfor %}"""
        + f"{{{{ '</' ~ mark ~ '{section}>' }}}}"
    )
    return _template(calls, f"{{% set mark = '{bar}' %}}")


def _tagged(
    open_: str, name: str, key: str, value: str, end: str, close: str, section: tuple[str, str] = ("", "")
) -> str:
    """Parameters between tags, as plain text; NAME and KEY stand for theirs."""
    return _template(
        section[0]
        + _EACH
        + f"{open_}{name.replace('NAME', '{{ f.name }}')}\n"
        + "{% for k, value in f.arguments.items() %}"
        + f"{key.replace('KEY', '{{ k }}')}{value}"
        + "{{ value if value is string else value | tojson }}"
        + f"{end}\n"
        + f"{{% endfor %}}{close}\n{{% endfor %}}{section[1]}"
    )


def _json(
    open_: str,
    close: str,
    name: str = "name",
    arguments: str = "arguments",
    between: str = "\\n",
    more: str = "",
) -> str:
    """JSON objects, each or all of them between marks."""
    return _template(
        f"{{{{ '{open_}' }}}}"
        + _EACH
        + f"""{{{{ '{{{more}"{name}": "' + f.name + '", "{arguments}": ' }}}}"""
        + "{{ f.arguments | tojson }}{{ '}' }}"
        + f"{{% if not loop.last %}}{{{{ '{between}' }}}}{{% endif %}}{{% endfor %}}{{{{ '{close}' }}}}"
    )


_INVOKE = ('<invoke name="', 'NAME">', '<parameter name="KEY">', "", "</parameter>", "</invoke>")
_ARGUMENTS = (
    "NAME\n", "<{0}arg_key{1}>KEY</{0}arg_key{1}>\n", "<{0}arg_value{1}>", "</{0}arg_value{1}>",
)  # fmt: skip


def _pairs(prefix: str = "", suffix: str = "") -> list[str]:
    return [part.format(prefix, suffix) for part in _ARGUMENTS]


_PYTHON = (
    "{{ f.name }}({% for k, value in f.arguments.items() %}{{ k }}={{ value | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
_M3 = """{% set ns = ']<]minimax[>[' %}
{%- macro element(value) %}
{%- if value is mapping %}{% for k, v in value.items() %}{{ ns + '<' + k + '>' }}{{ element(v) }}
{{- ns + '</' + k + '>' }}{% endfor %}
{%- elif value is iterable and value is not string %}
{%- for v in value %}{{ ns + '<item>' }}{{ element(v) }}{{ ns + '</item>' }}{% endfor %}
{%- else %}{{ value if value is string else value | tojson }}{% endif %}
{%- endmacro -%}
"""
_GEMMA = """{%- macro plain(value) %}
{%- if value is string %}{{ quote + value + quote }}
{%- elif value is mapping %}{{ '{' }}
{%- for k, v in value.items() %}{{ k }}:{{ plain(v) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}
{%- elif value is iterable %}[{% for v in value %}{{ plain(v) }}{% if not loop.last %},{% endif %}{% endfor %}]
{%- else %}{{ value | tojson }}{% endif %}
{%- endmacro -%}
"""
_K3 = (
    "{{ '<|open|>tools<|sep|>' }}"
    + _EACH
    + """{{ '<|open|>call tool="' + f.name + '" index="' + loop.index|string + '"<|sep|>' }}
{%- for k, value in f.arguments.items() %}
{%- set kind = 'string' if value is string else ('boolean' if value is boolean else 'object') %}
{{- '<|open|>argument key="' + k + '" type="' + kind + '"<|sep|>' }}
{{- value if value is string else value | tojson }}{{ '<|close|>argument<|sep|>' }}
{%- endfor %}{{ '<|close|>call<|sep|>' }}{% endfor %}{{ '<|close|>tools<|sep|>' }}"""
)

# The name of a format → a template whose calls are in it.
FAMILIES = {
    "muse": _template(
        " to=tools<|message|><atem:function_calls>\n"
        + _EACH
        + '<atem:invoke name="{{ f.name }}">\n{% for k, value in f.arguments.items() %}'
        + '<atem:parameter name="{{ k }}">{{ value if value is string else value | tojson }}</atem:parameter>\n'
        + "{% endfor %}</atem:invoke>\n{% endfor %}</atem:function_calls><|eom|>"
    ),
    "inkling": _template(
        _EACH
        + """{{ '<|message_model|>' + f.name + '<|content_invoke_tool_json|>' }}{{ '{"name":"' + f.name + '","args":' }}
{{- f.arguments | tojson }}{{ '}<|end_message|>' }}{% endfor %}"""
    ),
    "kimi-k3": _template(_K3),
    "minimax-m3": _template(
        "{{ ns + '<tool_call>\\n' }}"
        + _EACH
        + """{{ ns + '<invoke name="' + f.name + '">' }}{{ element(f.arguments) }}{{ ns + '</invoke>\\n' }}"""
        + "{% endfor %}{{ ns + '</tool_call>' }}",
        _M3,
    ),
    "minimax": _tagged(*_INVOKE, section=("<minimax:tool_call>\n", "</minimax:tool_call>")),
    "dots": _tagged(*_INVOKE, section=("<dots_function_call>\n", "</dots_function_call>")),
    "deepseek-v3.2": _dsml("｜DSML｜", "function_calls"),
    "deepseek-v4": _dsml("｜DSML｜", "tool_calls"),
    "gigachat-3.5": _dsml("｜GCML｜", "tool_calls"),
    "step3": _tagged(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', 'NAME">',
        '<steptml:parameter name="KEY">', "", "</steptml:parameter>", "</steptml:invoke><｜tool_call_end｜>",
        section=("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
    ),
    "k2-horizon": _tagged(
        "<ifm|tool_call>", *_pairs("ifm|"), "</ifm|tool_call>", section=("<ifm|tool_calls>\n", "</ifm|tool_calls>")
    ),
    "hy-v3": _tagged(
        "<tool_call>", "NAME<tool_sep>", *_pairs()[1:], "</tool_call>", section=("<tool_calls>\n", "</tool_calls>")
    ),
    "hy-v3-opensource": _tagged(
        "<tool_call:opensource>", "NAME<tool_sep:opensource>", *_pairs("", ":opensource")[1:],
        "</tool_call:opensource>", section=("<tool_calls:opensource>\n", "</tool_calls:opensource>"),
    ),
    "glm-4.x": _tagged("<tool_call>", *_pairs(), "</tool_call>"),
    "longcat-2": _tagged("<longcat_tool_call>", *_pairs("longcat_"), "</longcat_tool_call>"),
    "longcat": _json(
        "<longcat_tool_call>\\n", "\\n</longcat_tool_call>",
        between="\\n</longcat_tool_call>\\n<longcat_tool_call>\\n",
    ),
    "solar-open-2": _tagged(
        "<|tool_call:start|>", "NAME", "<|tool_arg:start|>KEY", "<|tool_arg:value|>", "<|tool_arg:end|>",
        "<|tool_call:end|>",
    ),
    "granite-20b": _json("<function_call> ", "", between=" <function_call> "),
    "hunyuan": _json("<tool_calls>[", "]</tool_calls>", between=", "),
    "minimax-m1": _json("<tool_calls>\\n", "\\n</tool_calls>"),
    "nemotron": _json("<TOOLCALL>[", "]</TOOLCALL>", between=", "),
    "lfm2": _template(
        "<|tool_call_start|>["
        + _EACH
        + _PYTHON
        + "{% if not loop.last %}, {% endif %}{% endfor %}]<|tool_call_end|>"
    ),
    "olmo3": _template("<function_calls>" + _EACH + _PYTHON + "\n{% endfor %}</function_calls>"),
    "minicpm5": _tagged('<function name="', 'NAME">', '<param name="KEY">', "", "</param>", "</function>"),
    "ernie": _json("<tool_call>\\n", "\\n</tool_call>", between="\\n</tool_call>\\n<tool_call>\\n")
    + "{# <response> answer </response> #}{% if false %}<response>\n</response>{% endif %}",
    "hermes": _json("<tool_call>\\n", "\\n</tool_call>", between="\\n</tool_call>\\n<tool_call>\\n"),
    "xlam": _template(
        "[" + _EACH + """{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}"""
        + "{% if not loop.last %}, {% endif %}{% endfor %}]",
        """{% if false %}One list: [{"name": "tool_call_name", "arguments": {}}]{% endif %}""",
    ),
    "internlm": _json("<|action_start|><|plugin|>\\n", "<|action_end|>", arguments="parameters"),
    "functiongemma": _template(
        _EACH + "<start_function_call>call:{{ f.name }}{{ plain(f.arguments) }}<end_function_call>{% endfor %}",
        "{% set quote = '<escape>' %}" + _GEMMA,
    ),
    "command-a": _json(
        "<|START_ACTION|>[\\n", "\\n]<|END_ACTION|>", "tool_name", "parameters", ",\\n", more='"tool_call_id": "0", '
    ),
}  # fmt: skip

# Calls in marks that belong to no format, or that an older format of the family has in part.
UNKNOWN = {
    "name, then JSON": _template(_EACH + "<tool_call>{{ f.name }}{{ f.arguments | tojson }}</tool_call>{% endfor %}"),
    "keys of another kind": _tagged("<tool_call>", "NAME", "<key>KEY</key>", "<value>", "</value>", "</tool_call>"),
    "marks of its own": _json("<|act|>", "<|/act|>"),
    "a separator between": _tagged("<tool_call>", "NAME<args>", "<arg KEY>", "", "</arg>", "</tool_call>"),
    "no calls": _template(""),
}  # fmt: skip
