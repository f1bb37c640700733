"""``[[filters]]`` of the gateway's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

FILTERED = "content_filter"  # the code of a refusal
When = Literal["both", "before", "after"]


@dataclass(frozen=True, slots=True)
class FilterArgs:
    """One of ``[[filters]]``; exactly one of ``hook``, ``url``, and ``keywords`` with ``patterns``."""

    name: str = ""
    hook: str | None = None
    url: str | None = None
    keywords: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    action: Literal["refuse", "redact"] = "refuse"
    replacement: str = "[removed]"
    when: When = "both"
    timeout_s: float = 2.0
    on_failure: Literal["refuse", "pass"] = "refuse"
    hold_chars: int = 1000


@dataclass(frozen=True, slots=True)
class FilterConfig:
    """A filter, and the arguments of its hook's constructor."""

    args: FilterArgs
    options: Mapping[str, Any] = field(default_factory=dict)
