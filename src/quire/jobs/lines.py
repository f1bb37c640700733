"""The lines of a batch's files: the requests of its input, and the answers and errors of its output."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from quire.durable import complete_lines
from quire.http.limits import BATCH_LINE_BYTES, BODY_VALUES, num_marks

MAX_LINES = 50_000  # OpenAI's
_MAX_ERRORS = 100  # shown of a failed batch
_REFUSED = {"stream": "A batch has whole answers.", "priority": "Batches have the lowest."}


class Line(NamedTuple):
    """One request of a batch."""

    custom_id: str
    body: bytes  # JSON


class LineError(NamedTuple):
    """Why a batch cannot run."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def check_lines(path: Path, endpoint: str) -> tuple[int, list[LineError]]:
    """Return the number of requests in the file and its errors; without errors the batch can run."""
    errors: list[LineError] = []
    seen: set[str] = set()
    num_lines = 0
    for number, raw in _numbered(path):
        num_lines += 1
        error = _check(raw, number, endpoint, seen)
        if error is not None:
            errors.append(error)
            if len(errors) == _MAX_ERRORS:
                break
    if num_lines > MAX_LINES:
        errors.append(
            LineError("too_many_requests", f"{num_lines} requests; at most {MAX_LINES} are allowed.")
        )
    if not num_lines:
        errors.append(
            LineError("empty_file", "The input file has no requests: one JSON object per line is expected.")
        )
    return num_lines, errors


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the requests of a file in which `check_lines` found no error."""
    for _, raw in _numbered(path):
        value = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        yield Line(msgspec.json.decode(value["custom_id"]), bytes(value["body"]))


def done_ids(path: Path) -> set[str]:
    """Return the custom ids that were answered; an incomplete last line, left by a crash, is removed."""
    if not path.exists():
        return set()
    with path.open("r+b") as file:
        lines = complete_lines(file.fileno(), file.read())
    return {msgspec.json.decode(line)["custom_id"] for line in lines}


def output_line(request_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Return a line of the output file (status 200) or of the error file (any other)."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _encoded(request_id, custom_id, response, None)


def unanswered_line(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return a line of the error file for a request that was not run to its end."""
    return _encoded(request_id, custom_id, None, {"code": code, "message": message})


def _encoded(request_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    value = {"id": "batch_req_" + request_id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(value) + b"\n"


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not empty; nothing after a line that is too long."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            raw = file.readline(BATCH_LINE_BYTES + 1)
            if raw.strip():
                yield number, raw
            if not raw or len(raw) > BATCH_LINE_BYTES:
                return


def _check(raw: bytes, number: int, endpoint: str, seen: set[str]) -> LineError | None:
    """Return the first error of a line, or None; ``seen`` are the custom ids of earlier lines."""

    def wrong(code: str, problem: str, param: str | None = None) -> LineError:
        return LineError(code, f"Line {number}{problem}", number, param)

    if len(raw) > BATCH_LINE_BYTES:
        return wrong(
            "line_too_large", f" has more than {BATCH_LINE_BYTES} bytes; at most so many are allowed."
        )
    if num_marks([raw]) > BODY_VALUES:
        return wrong("line_too_large", f" has more than {BODY_VALUES} values; at most so many are allowed.")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return wrong("invalid_json_line", f" is not JSON: {error}.")
    if not isinstance(value, dict):
        return wrong("invalid_json_line", " is not an object.")
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return wrong("missing_required_parameter", " has no custom_id.", "custom_id")
    if custom_id in seen:
        return wrong("duplicate_custom_id", ": custom_id is used twice.", "custom_id")
    seen.add(custom_id)
    for name, allowed, code in (
        ("method", "POST", "invalid_method"),
        ("url", endpoint, "mismatched_endpoint"),
    ):
        if value.get(name) != allowed:
            return wrong(code, f": {name} = {str(value.get(name))[:80]!r} must be {allowed!r}.", name)
    if not isinstance(body, dict):
        return wrong("missing_required_parameter", " has no body.", "body")
    for name, why in _REFUSED.items():
        if body.get(name):
            return wrong("invalid_request", f": body.{name} is not allowed: {why}", "body." + name)
    for name in sorted(value.keys() - {"custom_id", "method", "url", "body"}):
        return wrong("unknown_parameter", f": unknown field {name[:80]!r}.", name[:80])
    return None
