"""`quire chat`: wrapped answers, what is said at their end, pasted lines, and the template that it needs."""

from __future__ import annotations

import os
import pty
import random
import select
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.cells import cell_len
from tests.e2e.live import ROOT

from quire.cli.answer_text import AnswerEnd, WordWrap
from quire.engine.output import OutputChunk
from quire.models.hub import quill_path
from quire.request import FinishReason

CHAT = ["-m", "quire.cli", "chat"]
SMALL = ["--threads", "1", "--num-kv-blocks", "64", "--max-tokens", "8"]


def wrapped(pieces: list[str], width: int) -> str:
    out: list[str] = []
    wrap = WordWrap(out.append, lambda: width)
    for piece in pieces:
        wrap.feed(piece)
    wrap.close()
    return "".join(out)


@pytest.mark.parametrize("seed", range(40))
def test_lines_fit_and_words_stay_whole(seed: int) -> None:
    draw = random.Random(seed)
    words = ["a", "word", "Straße", "日本語の文章", "🙂🙂", "x" * 90, "end.", "\n", "\n\n", "   ", "\t"]
    text = " ".join(draw.choice(words) for _ in range(60))
    width = draw.randint(20, 60)
    cuts = sorted(draw.sample(range(len(text)), 30))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    lines = wrapped(pieces, width).split("\n")
    assert max(map(cell_len, lines)) <= width
    assert "".join("".join(lines).split()) == "".join(text.split())  # nothing is lost
    short = [word for word in text.split() if word.isascii() and len(word) < 10]
    shown = [word for line in lines for word in line.split()]
    assert [word for word in shown if word in set(short)] == short


def test_a_line_breaks_at_the_last_word_that_fits() -> None:
    assert wrapped(["the quick brown fox"], 10) == "the quick\nbrown fox"
    assert wrapped(["the qu", "ick brow", "n fox\n  jumps"], 10) == "the quick\nbrown fox\n  jumps"
    assert wrapped(["a" * 25], 10) == "\n".join(["a" * 10, "a" * 10, "a" * 5])


@pytest.mark.parametrize(
    ("reason", "stop", "stopped", "full", "said"),
    [
        (FinishReason.STOP, None, False, False, "the model ended it"),
        (FinishReason.STOP, "END", False, False, "ended at 'END'"),
        (FinishReason.LENGTH, None, False, False, "cut at --max-tokens 9"),
        (FinishReason.LENGTH, None, False, True, "cut: the context is full (/reset starts anew)"),
        (None, None, True, False, "stopped by Ctrl-C"),
        (FinishReason.ERROR, None, False, False, "ended: error"),
    ],
)
def test_the_end_of_an_answer_is_explained(
    reason: FinishReason | None, stop: str | None, stopped: bool, full: bool, said: str
) -> None:
    end = AnswerEnd(10.0)
    end.take(OutputChunk(0, "a", (1,)), 10.5)
    end.take(OutputChunk(0, "b", (2, 3), finish_reason=reason, stop_reason=stop), 11.5)
    line = end.line(stopped=stopped, max_tokens=9, fills_context=full)
    assert line == f"3 tokens, 2.0 tokens/s, first after 0.50 s; {said}"


def test_a_model_without_a_template_does_not_greet(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    for file in quill_path("quill").iterdir():
        if "template" not in file.name:
            (folder / file.name).symlink_to(file)
    settings = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(settings.replace('"chat_template"', '"was_template"'))
    done = subprocess.run(
        [sys.executable, *CHAT, str(folder), *SMALL], input="hi\n", capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src"}, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0
    assert "has no chat template" in done.stderr + done.stdout
    assert "Ctrl-D leaves" not in done.stdout


class Terminal:
    """A process in a terminal of 60 columns."""

    def __init__(self, command: list[str]) -> None:
        self._fd, child = pty.openpty()
        ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
        env = {**os.environ, "PYTHONPATH": "src", "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=child, stdout=child, stderr=child, cwd=ROOT, env=env,
            start_new_session=True,
        )  # fmt: skip
        os.close(child)
        self.shown = ""

    def wait_for(self, text: str, timeout_s: float = 90.0) -> str:
        """Return what was shown until ``text`` appeared."""
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            if select.select([self._fd], [], [], 0.5)[0]:
                try:
                    self.shown += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    raise AssertionError(self.shown) from None
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self._fd)


def test_pasted_lines_are_one_message() -> None:
    terminal = Terminal([*CHAT, "quill", *SMALL])
    try:
        terminal.wait_for("Ctrl-D leaves.")
        terminal.wait_for("\x1b[?2004h")  # the terminal is asked to mark pasted text
        terminal.type("\x1b[200~First line.\nSecond line.\x1b[201~")
        terminal.wait_for("Second")
        terminal.type("\r")
        assert "Ctrl-C" not in terminal.wait_for(" s; ")
        terminal.wait_for("\x1b[?2004h")
        terminal.type("/save /dev/stdout\r")
        assert "First line.\\nSecond line." in terminal.wait_for("written to")
        terminal.wait_for("\x1b[?2004h")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.close()
