"""What a model writes, taken apart while it is written: content, reasoning and tool calls (docs/tools.md).

format      how one family of models writes them: data
formats     the table of all formats
detect      chat template → format
parser      text in pieces → deltas
sections    the ways in which calls are written: JSON objects, named JSON, tagged parameters, Python
"""

from quire.text.output.formats import (
    FORMATS,
    CallDelta,
    ContentDelta,
    Delta,
    OutputFormat,
    ReasoningDelta,
    detect_format,
    prompt_opening,
)
from quire.text.output.parser import OutputParser

__all__ = [
    "FORMATS",
    "CallDelta",
    "ContentDelta",
    "Delta",
    "OutputFormat",
    "OutputParser",
    "ReasoningDelta",
    "detect_format",
    "prompt_opening",
]
