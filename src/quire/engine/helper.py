"""A helper process: work on what a client sent that may take all time, memory or stack.

Started by `quire.engine.helper_pool` as ``python -m quire.engine.helper KIND``. Messages in both directions are frames:
eight bytes of length, then so many bytes. The first frame is the head, which is answered with a greeting when the
helper is ready; then each task has one answer.

    kind       head, in JSON                                          task ──> answer
    grammar    tokens, special, eos                                   {"source"} ──> {"grammar"} or {"error"}
    template   templates, roles, additional                           arguments of `ChatTemplate.render` and "now", the
                                                                      local time ──> {"text"} or {"error"}
    text       tokenizer: the path of its tokenizer.json              "0" or "1" (add special tokens) and the text in
                                                                      UTF-8 ──> its ids, uint32
    body       characters: the longest text allowed                   a body ──> "=" and its value in msgpack, or a
                                                                      refusal in JSON
    image      vision: the fields of a `VisionSpec`                   a file ──> "=" and a `PreparedImage` in msgpack,
                                                                      or "!" and the reason of a refusal

The parent kills a helper that takes too long. If a helper dies of a stack or memory overflow, its task has failed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import signal
import sys
import time
from array import array
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from setproctitle import setproctitle
from tokenizers import Tokenizer as Backend

from quire.errors import ModelLoadError, RequestError
from quire.http.memory import trim
from quire.recording_signal import pass_recording_signal_on
from quire.text.chat_template import ChatTemplate
from quire.text.grammar import NUM_LEVELS, build_grammar
from quire.text.grammar_matcher import compile_matcher, first_error, ll_tokenizer
from quire.text.token_table import TokenTable
from quire.text.tokenizer import SpecialTokens
from quire.units import PIECE_BYTES

Answer = dict[str, Any]
Perform = Callable[[bytes], bytes]
_MAX_ERROR_CHARS = 600
# The engine compiles a grammar again while other requests wait for tokens. The slowest of JSONSchemaBench takes 0.2 s.
CPU_LIMIT_S = 0.5


def main(kind: str, tasks: BinaryIO, answers: BinaryIO) -> None:
    """Answer tasks until the parent closes the pipe."""
    setproctitle("quire: helper")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    pass_recording_signal_on()
    head = json.loads(_read(tasks))
    kinds = {
        "grammar": _grammars, "template": _templates, "text": _texts, "body": _bodies, "image": _images,
    }  # fmt: skip
    greeting, perform = kinds[kind](head)
    _write(answers, json.dumps(greeting).encode())
    while task := _read(tasks):
        is_large = len(task) > PIECE_BYTES  # its memory goes back to the system
        _write(answers, perform(task))
        del task
        if is_large:
            trim()


def _read(tasks: BinaryIO) -> bytes:
    """Return the next frame; empty at the end. No task is empty."""
    return tasks.read(int.from_bytes(tasks.read(8)))


def _write(answers: BinaryIO, answer: bytes) -> None:
    answers.write(len(answer).to_bytes(8))
    answers.write(answer)
    answers.flush()


def _grammars(head: dict[str, Any]) -> tuple[Answer, Perform]:
    tokens = [token.encode("latin-1") for token in head["tokens"]]
    tokenizer = ll_tokenizer(TokenTable(tokens, head["special"], head["eos"]))
    _limit_memory(head["memory"])
    return {}, lambda task: json.dumps(_compile(json.loads(task)["source"], tokenizer)).encode()


def _compile(source: str, tokenizer: Any) -> Answer:
    """Compile a grammar and compute its first mask. An error in either is the client's."""
    start_s = time.process_time()
    try:
        grammar = build_grammar(source)
        error = first_error(compile_matcher(tokenizer, grammar))
        if error and '"json_schema"' in grammar:
            for level in range(1, NUM_LEVELS):
                other = _other_grammar(source, level, tokenizer)
                if other is not None:
                    grammar, error = other, ""  # else the first error stays: it names what the client wrote
                    break
        if not error and time.process_time() - start_s > CPU_LIMIT_S:
            error = f"compiling it takes longer than {CPU_LIMIT_S:g} s"
    except RequestError as failure:
        error = str(failure)
    except RecursionError:
        error = "it is nested too deeply"
    except MemoryError:
        error = "compiling it takes too much memory"
    return {"error": _short(error)} if error else {"grammar": grammar}


def _other_grammar(source: str, level: int, tokenizer: Any) -> str | None:
    """Return the grammar of a JSON schema that is rewritten or relaxed, None if that is rejected, too."""
    try:
        grammar = build_grammar(source, level)
    except RequestError:
        return None
    return None if first_error(compile_matcher(tokenizer, grammar)) else grammar


def _short(error: str) -> str:
    """Return the error on one line. A long error keeps its beginning (where) and its end (what)."""
    line, half = " ".join(error.split()), _MAX_ERROR_CHARS // 2
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[:half]} … {line[-half:]}"


def _templates(head: dict[str, Any]) -> tuple[Answer, Perform]:
    now = [datetime.min]
    special = SpecialTokens(roles=head["roles"], additional=tuple(head["additional"]))
    template = ChatTemplate(head["templates"], special, lambda: now[0])
    _limit_memory(head["memory"])

    def render(raw: bytes) -> bytes:
        task = json.loads(raw)
        now[0] = datetime.fromisoformat(task.pop("now"))
        try:
            answer = {"text": template.render(**task)}
        except RequestError as error:
            answer = _refused(error)
        return json.dumps(answer).encode()

    try:
        template.compile()
    except ModelLoadError as error:
        return {"error": str(error)}, render
    return {}, render


def _refused(error: RequestError) -> Answer:
    return {"error": str(error), "param": error.param, "code": error.code}


def _texts(head: dict[str, Any]) -> tuple[Answer, Perform]:
    backend = Backend.from_file(head["tokenizer"])
    backend.no_truncation()
    backend.no_padding()
    _limit_memory(head["memory"])

    def encode(task: bytes) -> bytes:
        text = task[1:].decode(errors="surrogatepass")
        return array(
            "I", backend.encode_batch_fast([text], add_special_tokens=task[:1] == b"1")[0].ids
        ).tobytes()

    return {}, encode


def _bodies(head: dict[str, Any]) -> tuple[Answer, Perform]:
    from quire.engine.large_body import parse

    _limit_memory(head["memory"])
    # Values of JSON have no cycles, and every collection would walk over all of them.
    gc.disable()
    return {}, partial(parse, max_characters=head["characters"])


def _images(head: dict[str, Any]) -> tuple[Answer, Perform]:
    from quire.images.work import performer

    perform = performer(head["vision"])
    _limit_memory(head["memory"])
    return {}, perform


def _limit_memory(extra_bytes: int) -> None:
    """Let this process have ``extra_bytes`` of address space beyond what it has now."""
    with contextlib.suppress(OSError, ValueError):  # without /proc only the time limit protects
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, EOFError):
        main(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer)
