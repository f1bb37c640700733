"""What `quire eval` reads: texts from .txt, .raw and .jsonl, choice tasks from .jsonl, each also gzipped.

A line of JSONL is a text (``{"text": …}``) or a task in one of the spellings of lm-eval's data sets: a context, its
choices, and the index, the label or the text of the right one.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, clip

SUFFIXES = (".txt", ".raw", ".jsonl")
# Keys of a task, the plainest name first.
CONTEXT = ("context", "query", "question", "ctx", "prompt")
CHOICES = ("choices", "endings", "options")
GOLD = ("gold", "label", "answer", "answerKey")


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the file (and line) that it stands in."""

    where: str
    text: str


@dataclass(frozen=True, slots=True)
class ChoiceTask:
    """A question whose answer is the most likely of ``choices``; ``gold`` is the index of the right one."""

    where: str
    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything under one path, in the order of names and lines."""

    documents: tuple[Document, ...]
    tasks: tuple[ChoiceTask, ...]


def read_inputs(path: Path) -> Inputs:
    """Read a file, or every file of a folder that has one of `SUFFIXES`.

    Raises:
        ConfigError: there is nothing to read, or a file or a line is wrong; it names file, line and field.
    """
    documents: list[Document] = []
    tasks: list[ChoiceTask] = []
    for file in _files(path):
        for entry in _entries(file):
            if isinstance(entry, ChoiceTask):
                tasks.append(entry)
            elif entry.text.strip():
                documents.append(entry)
    if not documents and not tasks:
        raise ConfigError(f"text: {path} has no text in it")
    return Inputs(tuple(documents), tuple(tasks))


def _kind(file: Path) -> str:
    """Return the suffix that says what is in a file, without .gz."""
    return (file.with_suffix("") if file.suffix == ".gz" else file).suffix


def _files(path: Path) -> list[Path]:
    allowed = f"{', '.join(SUFFIXES)}, each also with .gz"
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in SUFFIXES)
        if not files:
            raise ConfigError(f"text: the folder {path} has no file of the kinds that are read ({allowed})")
        return files
    if not path.exists():
        raise ConfigError(f"text: there is no file or folder {str(path)!r}")
    if _kind(path) not in SUFFIXES:
        raise ConfigError(f"text: {path} is of a kind that is not read; allowed: {allowed}")
    return [path]


def _entries(file: Path) -> Iterator[Document | ChoiceTask]:
    text = _read(file)
    if _kind(file) != ".jsonl":
        yield Document(str(file), text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield parse_line(line, f"{file}:{number}")


def _read(file: Path) -> str:
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{file}:{line}: not UTF-8 (byte {error.start} of the text)") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None


def parse_line(line: str, where: str) -> Document | ChoiceTask:
    """Return what a line of JSONL holds. Raises `ConfigError` that begins with ``where`` and names the field."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {clip(entry)} must be a JSON object")
    if (choices := _key(entry, CHOICES)) is not None:
        return _task(entry, choices, where)
    if "text" not in entry:
        raise ConfigError(
            f'{where}: the object needs "text", or "context", "choices" and "gold"; it has '
            f"{', '.join(map(repr, entry)) or 'no field'}"
        )
    return Document(where, _text(entry, "text", where))


def _key(entry: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in entry), None)


def _text(entry: Mapping[str, Any], key: str, where: str) -> str:
    value = entry[key]
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key} = {clip(value)} must be a text")
    return value


def _task(entry: Mapping[str, Any], key: str, where: str) -> ChoiceTask:
    context, gold = _key(entry, CONTEXT), _key(entry, GOLD)
    if context is None or gold is None:
        lacking, names = ("context", CONTEXT) if context is None else ("gold", GOLD)
        raise ConfigError(f"{where}: {lacking} is missing (one of {', '.join(names)})")
    choices: Any = entry[key]
    labels: Any = None
    if isinstance(choices, dict):  # ARC: {"text": […], "label": […]}
        choices, labels = choices.get("text"), choices.get("label")
    if not _are_texts(choices) or len(choices) < 2 or not all(choices):
        raise ConfigError(
            f"{where}: {key} = {clip(entry[key])} must be a list of two texts or more, none empty"
        )
    if labels is not None and (not _are_texts(labels) or len(labels) != len(choices)):
        raise ConfigError(f"{where}: {key}.label = {clip(labels)} must be a list of {len(choices)} texts")
    index = _index(entry[gold], choices, labels)
    if index is None:
        raise ConfigError(
            f"{where}: {gold} = {clip(entry[gold])} must be the index (0…{len(choices) - 1}), the label or the text of "
            f"one of the {len(choices)} {key}"
        )
    return ChoiceTask(where, _text(entry, context, where), tuple(choices), index)


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _index(value: Any, choices: list[str], labels: list[str] | None) -> int | None:
    """Return which choice ``value`` names; a label counts before an index, since labels may be digits."""
    if isinstance(value, str):
        for names in (labels or [], choices):
            if value in names:
                return names.index(value)
        if value.isascii() and value.isdigit():
            value = int(value)
        elif labels is None and len(value) == 1 and "A" <= value <= "Z":
            value = ord(value) - ord("A")
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
        return value
    return None
