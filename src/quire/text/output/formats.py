"""The formats, in the order in which `detect` tries them.

Sources: the chat templates of the models (Hugging Face), and for harmony OpenAI's description of the gpt-oss format.
"""

from __future__ import annotations

from dataclasses import replace

from quire.text.output.format import GemmaCalls, JsonCalls, NamedCalls, OutputFormat, PythonCalls, TaggedCalls

THINK = ("<think>", "</think>")
_QWEN_XML = TaggedCalls(
    open="<function=",
    name_end=">",
    key="<parameter=",
    key_end=">",
    value_end="</parameter>",
    close="</function>",
)
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_GIGACHAT = ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n")

PLAIN = OutputFormat("plain")
REASONING_ONLY = OutputFormat("reasoning", reasoning=THINK)

_ALL = (
    OutputFormat("harmony", harmony=True),
    OutputFormat(
        "minimax",
        ("<minimax:tool_call>",),
        ("</minimax:tool_call>",),
        TaggedCalls('<invoke name="', '">', '<parameter name="', '">', "</parameter>", "</invoke>"),
        reasoning=THINK,
    ),
    OutputFormat(
        "seed",
        ("<seed:tool_call>",),
        ("</seed:tool_call>",),
        _QWEN_XML,
        reasoning=("<seed:think>", "</seed:think>"),
    ),
    OutputFormat("qwen3-coder", ("<tool_call>",), ("</tool_call>",), _QWEN_XML, reasoning=THINK),
    OutputFormat(
        "glm-4.x",
        ("<tool_call>",),
        ("</tool_call>",),
        TaggedCalls("", "", "<arg_key>", "</arg_key>", "</arg_value>", "", value="<arg_value>"),
        reasoning=THINK,
    ),
    OutputFormat(
        "deepseek-v3.1",
        (_DEEPSEEK[0],),
        (_DEEPSEEK[1],),
        NamedCalls(_DEEPSEEK_CALL[0], "<｜tool▁sep｜>", _DEEPSEEK_CALL[1]),
        reasoning=THINK,
    ),
    OutputFormat(
        "deepseek-v3",
        (_DEEPSEEK[0],),
        (_DEEPSEEK[1],),
        NamedCalls(
            _DEEPSEEK_CALL[0],
            "\n```json\n",
            "\n```" + _DEEPSEEK_CALL[1],
            r"function<｜tool▁sep｜>(?P<name>\S+)",
        ),
        reasoning=THINK,
    ),
    OutputFormat(
        "kimi-k2",
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_end|>",),
        NamedCalls(
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:]+)(?::\d+)?)\s*",
        ),
        reasoning=THINK,
    ),
    OutputFormat(
        "mistral",  # Tekken v11 and later: [TOOL_CALLS]name[ARGS]{…}
        (),
        (),
        NamedCalls(
            "[TOOL_CALLS]", "[ARGS]", "", r"\s*(?P<name>[^\s\[]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[]+)\s*)?"
        ),
        reasoning=("[THINK]", "[/THINK]"),
    ),
    OutputFormat("mistral-json", ("[TOOL_CALLS]",), (), JsonCalls()),
    OutputFormat(
        "solar",
        ("<|tool_calls|>",),
        ("<|calls|>",),
        NamedCalls(
            "<|tool_call:begin|>",
            "<|tool_call:args|>",
            "<|tool_call:end|>",
            r"\s*(?P<id>[^<\s]*)\s*<\|tool_call:name\|>(?P<name>\S+?)\s*",
        ),
    ),
    OutputFormat(
        "granite", ("<|tool_call|>", "<tool_call>"), ("</tool_call>",), JsonCalls(), reasoning=THINK
    ),
    OutputFormat("apertus", ("<|tools_prefix|>",), ("<|tools_suffix|>",), JsonCalls(name_is_key=True)),
    OutputFormat(
        "apriel",
        ("<tool_calls>",),
        ("</tool_calls>",),
        JsonCalls(),
        reasoning=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ),
    OutputFormat("lfm2", ("<|tool_call_start|>",), ("<|tool_call_end|>",), PythonCalls(), reasoning=THINK),
    OutputFormat("llama4-pythonic", ("<|python_start|>",), ("<|python_end|>",), PythonCalls(), bare="["),
    OutputFormat("functionary-v3.1", (), (), NamedCalls("<function=", ">", "</function>")),
    OutputFormat(
        "functionary-v3.2", (), (), NamedCalls(">>>", "\n", "", r"(?P<name>[^\s{]+)"), drops=(">>>all\n",)
    ),
    OutputFormat("llama3-json", ("<|python_tag|>",), (), JsonCalls(), bare="{"),
    OutputFormat("functools", ("functools",), (), JsonCalls()),
    OutputFormat(
        "gigachat",
        (
            "<|function_call|>",
            "<|message_sep|>\n\nfunction call<|role_sep|>\n",
            "function call<|role_sep|>\n",
        ),
        ("<|message_sep|>",),
        JsonCalls(),
    ),
    OutputFormat(
        "command-r", ("Action:\n```json\n", "Action: ```json\n", "Action:```json\n"), ("```",), JsonCalls()
    ),
    OutputFormat(
        "gemma-4",
        ("<|tool_call>",),
        ("<tool_call|>",),
        GemmaCalls(),
        reasoning=("<|channel>thought\n", "<channel|>"),
    ),
    OutputFormat("hermes", ("<tool_call>",), ("</tool_call>",), JsonCalls(), reasoning=THINK),
    OutputFormat("json", (), (), JsonCalls(), bare="{"),
    REASONING_ONLY,
    PLAIN,
)

FORMATS: dict[str, OutputFormat] = {format.name: format for format in _ALL}


def without_tools(format: OutputFormat) -> OutputFormat:
    """Return the format for a request without tools: reasoning alone is taken apart."""
    return format if format.harmony else replace(format, opens=(), closes=(), calls=None, bare="")
