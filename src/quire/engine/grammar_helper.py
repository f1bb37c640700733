"""The helper process of `quire.engine.grammar_check`: compiles what strangers wrote, where it can harm nobody.

    stdin   ──> {"tokens": […], "special": […], "eos": […], "memory": bytes}, then {"source": "…"} a line
    stdout  <── {} when the vocabulary is ready, then {"grammar": "…"} or {"error": "…"} for each source

The parent ends it when it takes too long. When it dies of a stack or memory overflow, that is the answer.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from quire.errors import RequestError
from quire.text.grammar import build_grammar
from quire.text.grammar_matcher import TokenTable, compile_matcher, first_error, ll_tokenizer

_MAX_ERROR_CHARS = 600
# The engine compiles it once more while others wait for their tokens. The slowest of JSONSchemaBench takes 0.2 s.
CPU_LIMIT_S = 0.5


def main(lines: TextIO, answers: TextIO) -> None:
    """Answer until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    head = json.loads(lines.readline())
    tokens = [token.encode("latin-1") for token in head["tokens"]]
    tokenizer = ll_tokenizer(TokenTable(tokens, head["special"], head["eos"]))
    _limit_memory(head["memory"])
    _answer(answers, {})
    for line in lines:
        _answer(answers, _check(json.loads(line)["source"], tokenizer))


def _check(source: str, tokenizer: Any) -> dict[str, str]:
    """Compile, and compute the first mask: what both find wrong is the client's error."""
    start_s = time.process_time()
    try:
        grammar = build_grammar(source)
        error = first_error(compile_matcher(tokenizer, grammar))
        if error and '"json_schema"' in grammar:
            simpler = build_grammar(source, write_out=True)
            if not first_error(compile_matcher(tokenizer, simpler)):
                grammar, error = simpler, ""  # else the first error is the one that names what was written
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
    """One line; of a long one the beginning (where) and the end (what)."""
    line, half = " ".join(error.split()), _MAX_ERROR_CHARS // 2
    return line if len(line) <= _MAX_ERROR_CHARS else f"{line[:half]} … {line[-half:]}"


def _limit_memory(extra_bytes: int) -> None:
    """Let this process have ``extra_bytes`` of address space beyond what it has now."""
    with contextlib.suppress(OSError, ValueError):  # no /proc: the time limit alone protects
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(answers: TextIO, value: dict[str, str]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, EOFError):
        main(sys.stdin, sys.stdout)
