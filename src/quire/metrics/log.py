"""Logs: one short line per event with named fields, or the same as JSON.

    12:50:38 INFO  api ready url=http://127.0.0.1:8000 model=quill
    12:50:41 ERROR api request_failed request_id=chatcmpl-1f… error="step 12 failed: …"

Start-up and errors are INFO and above; the line per request is DEBUG.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import IO, Any, Literal

LogStyle = Literal["human", "json"]
_ROOT = "quire"
_NEEDS_QUOTES = set(' "=\\')


class Log:
    """A named logger; a line is an event and its fields: ``log.info("ready", url=url)``."""

    __slots__ = ("_logger",)

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"{_ROOT}.{name}")

    def debug(self, event: str, **fields: Any) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: Any) -> None:
        """Like `error`, with the traceback of the exception being handled."""
        self._logger.error(event, exc_info=True, extra={"fields": fields})

    def is_debugging(self) -> bool:
        """Whether DEBUG lines are written. Lets a hot path skip building the fields."""
        return self._logger.isEnabledFor(logging.DEBUG)

    def _emit(self, level: int, event: str, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={"fields": fields})


def configure(level: str = "info", *, stream: IO[str] | None = None, style: LogStyle = "human") -> None:
    """Write Quire's logs to ``stream`` (default: stderr) from ``level`` up. A second call replaces the first."""
    logger = logging.getLogger(_ROOT)
    for old in list(logger.handlers):
        logger.removeHandler(old)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else HumanFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def configured() -> tuple[str, LogStyle]:
    """Return the level and the style of Quire's logs, for a child process that is to log alike."""
    logger = logging.getLogger(_ROOT)
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logger.handlers)
    return logging.getLevelName(logger.getEffectiveLevel()).lower(), "json" if is_json else "human"


class HumanFormatter(logging.Formatter):
    """``HH:MM:SS LEVEL name event key=value …``; values with spaces are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        name = record.name.removeprefix(_ROOT + ".")
        fields = "".join(f" {k}={_value(v)}" for k, v in getattr(record, "fields", {}).items())
        when = self.formatTime(record, "%H:%M:%S")
        line = f"{when} {record.levelname:<5} {name} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: ``time`` (seconds since 1970), ``level``, ``name``, ``event`` and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "name": record.name.removeprefix(_ROOT + "."),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    if text and not _NEEDS_QUOTES.intersection(text) and text.isprintable():
        return text
    return json.dumps(text, ensure_ascii=False)
