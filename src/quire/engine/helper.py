"""A helper process: compiles grammars, or renders chat templates, that may take all time, memory or stack.

Started by `quire.engine.helper_pool` as ``python -m quire.engine.helper KIND``. One JSON value per line:

    grammar    stdin   ──> {"tokens": […], "special": […], "eos": […], "memory": bytes}, then {"source": "…"} per task
               stdout  <── {} when the vocabulary is ready, then {"grammar": "…"} or {"error": "…"} per task
    template   stdin   ──> {"templates": {…}, "roles": {…}, "additional": […], "memory": bytes}, then per task the
                           arguments of `ChatTemplate.render` with "now", the local time
               stdout  <── {} or {"error": "…"} when the templates are compiled, then {"text": "…"} or {"error": "…"}

The parent kills a helper that takes too long. If a helper dies of a stack or memory overflow, its task has failed.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from setproctitle import setproctitle

from quire.errors import ModelLoadError, RequestError
from quire.text.chat_template import ChatTemplate
from quire.text.grammar import build_grammar
from quire.text.grammar_matcher import TokenTable, compile_matcher, first_error, ll_tokenizer
from quire.text.tokenizer import SpecialTokens

Answer = dict[str, Any]
_MAX_ERROR_CHARS = 600
# The engine compiles a grammar again while other requests wait for tokens. The slowest of JSONSchemaBench takes 0.2 s.
CPU_LIMIT_S = 0.5


def main(kind: str, lines: TextIO, answers: TextIO) -> None:
    """Answer tasks until the parent closes the pipe."""
    setproctitle("quire: helper")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    head = json.loads(lines.readline())
    greeting, perform = (_grammars if kind == "grammar" else _templates)(head)
    _send(answers, greeting)
    for line in lines:
        _send(answers, perform(json.loads(line)))


def _send(answers: TextIO, answer: Answer) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _grammars(head: dict[str, Any]) -> tuple[Answer, Callable[[Answer], Answer]]:
    tokens = [token.encode("latin-1") for token in head["tokens"]]
    tokenizer = ll_tokenizer(TokenTable(tokens, head["special"], head["eos"]))
    _limit_memory(head["memory"])
    return {}, lambda task: _compile(task["source"], tokenizer)


def _compile(source: str, tokenizer: Any) -> Answer:
    """Compile a grammar and compute its first mask. An error in either is the client's."""
    start_s = time.process_time()
    try:
        grammar = build_grammar(source)
        error = first_error(compile_matcher(tokenizer, grammar))
        if error and '"json_schema"' in grammar:
            simpler = build_grammar(source, write_out=True)
            if not first_error(compile_matcher(tokenizer, simpler)):
                grammar, error = simpler, ""  # else the first error stays: it names what the client wrote
        if not error and time.process_time() - start_s > CPU_LIMIT_S:
            error = f"compiling it takes longer than {CPU_LIMIT_S:g} s"
    except RequestError as failure:
        error = str(failure)
    except RecursionError:
        error = "it is nested too deeply"
    except MemoryError:
        error = "compiling it takes too much memory"
    return {"error": _short(error)} if error else {"grammar": grammar}


def _short(error: str) -> str:
    """Return the error on one line. A long error keeps its beginning (where) and its end (what)."""
    line, half = " ".join(error.split()), _MAX_ERROR_CHARS // 2
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[:half]} … {line[-half:]}"


def _templates(head: dict[str, Any]) -> tuple[Answer, Callable[[Answer], Answer]]:
    now = [datetime.min]
    special = SpecialTokens(roles=head["roles"], additional=tuple(head["additional"]))
    template = ChatTemplate(head["templates"], special, lambda: now[0])
    _limit_memory(head["memory"])

    def render(task: Answer) -> Answer:
        now[0] = datetime.fromisoformat(task.pop("now"))
        try:
            return {"text": template.render(**task)}
        except RequestError as error:
            return {"error": str(error), "param": error.param, "code": error.code}

    try:
        template.compile()
    except ModelLoadError as error:
        return {"error": str(error)}, render
    return {}, render


def _limit_memory(extra_bytes: int) -> None:
    """Let this process have ``extra_bytes`` of address space beyond what it has now."""
    with contextlib.suppress(OSError, ValueError):  # without /proc only the time limit protects
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, EOFError):
        main(sys.argv[1], sys.stdin, sys.stdout)
