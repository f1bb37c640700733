"""`quire run` and `quire chat`: one model in the terminal, streaming, with an engine process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from quire.args import EngineArgs, executor_of
from quire.cli.answer_text import AnswerEnd, WordWrap
from quire.cli.flags import ChatArgs, RunArgs, pick
from quire.clock import WallClock
from quire.device import detect_device, slow_kernels
from quire.engine.assemble import configure, load_text
from quire.engine.frontend import Frontend
from quire.engine.process import ProcessClient
from quire.engine.spawn import EngineProcess
from quire.engine.stream import RequestStream
from quire.errors import ConfigError, QuireError, RequestError
from quire.request import Adapter, FinishReason

HELP = """\
/reset        forget the conversation        /retry        answer the last message again
/undo         take back the last exchange    /system TEXT  set the system message and start anew
/save FILE    write the conversation as JSON /help         this text
/exit         leave (Ctrl-D too)             Ctrl-C        stop an answer, or clear the line
Alt-Enter     a new line; pasted lines stay together, Enter sends them"""

out = Console(highlight=False, soft_wrap=True)
err = Console(highlight=False, soft_wrap=True, stderr=True)


@contextmanager
def open_frontend(
    settings: dict[str, Any], chat_template: str | None, *, chats: bool = False
) -> Iterator[tuple[Frontend, asyncio.Runner]]:
    """Start an engine for ``settings``; yield its frontend, ready, and the event loop that it belongs to.

    Raises:
        ConfigError: with ``chats``, the model has no chat template.
    """
    args = pick(EngineArgs, settings)
    process = EngineProcess(executor_of(args))
    try:
        if len(args.lora) > 1:
            raise ConfigError(
                f"the terminal runs one adapter, and lora names {len(args.lora)}: give only one"
            )
        config, checkpoint = configure(args, detect_device(args.device))
        text = load_text(args, config, checkpoint, chat_template=chat_template)
        if chats and not text.chat_template.names:
            raise ConfigError(
                f"{args.model} has no chat template, so it cannot chat: give one with --chat-template FILE, or let it "
                f"continue a text with quire run {args.model} TEXT."
            )
        client = ProcessClient(config, executor=executor_of(args), process=process)
        with asyncio.Runner() as runner:
            frontend = Frontend(
                client, text.tokenizer, text.chat_template, text.model, WallClock(), adapters=text.adapters
            )
            try:
                with err.status(f"loading {args.model} …"):
                    runner.run(frontend.start())
                if note := slow_kernels(config.device, config.runner.kernels):
                    err.print(note, style="dim", markup=False)
                yield frontend, runner
            finally:
                runner.run(frontend.close())
    finally:
        process.close()


def named_adapter(frontend: Frontend) -> Adapter | None:
    """Return the adapter of --lora, None without one."""
    registry = frontend.adapters
    return None if registry is None else next(iter(registry.adapters.values()), None)


async def print_stream(
    stream: RequestStream, write: Callable[[str], object] | None = None, end: AnswerEnd | None = None
) -> tuple[str, bool]:
    """Write the text as it arrives; return it, and whether Ctrl-C stopped it. ``end`` counts the tokens."""
    clock, parts = WallClock(), list[str]()
    try:
        async for chunk in stream:
            if chunk.finish_reason is FinishReason.ERROR:
                err.print(f"[red]the engine failed: {chunk.error}[/red]")
            if end is not None:
                end.take(chunk, clock.now())
            parts.append(chunk.text)
            (write or sys.stdout.write)(chunk.text)
            sys.stdout.flush()
    except asyncio.CancelledError:
        # asyncio's answer to Ctrl-C: the stream has aborted its request.
        return "".join(parts), True
    return "".join(parts), False


def run(settings: dict[str, Any], prompt: str | None, args: RunArgs) -> int:
    """Continue ``prompt`` (None: standard input) and print the text; return the exit status."""
    text = prompt if prompt is not None else sys.stdin.read()
    sampling = _set_values(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.sample_seed)

    async def once(frontend: Frontend) -> bool:
        _, stopped = await print_stream(
            await frontend.submit(
                text, frontend.model.sampling(**sampling), continues=True, adapter=named_adapter(frontend)
            )
        )
        return stopped

    with open_frontend(settings, None) as (frontend, runner):
        if sys.stdout.isatty():
            out.print(text, end="", style="dim", markup=False)
        stopped = runner.run(once(frontend))
    sys.stdout.write("\n")
    return 130 if stopped else 0


@dataclass(slots=True)
class Conversation:
    """The messages of a chat; a system message comes first."""

    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + self.turns

    def undo(self) -> str | None:
        """Take back the last user message and what followed; return its text."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return turn["content"]
        return None


def chat(settings: dict[str, Any], args: ChatArgs) -> int:
    """Chat until the end of the input; return the exit status."""
    conversation = Conversation(args.system)
    sampling = _set_values(max_tokens=args.max_tokens, temperature=args.temperature)
    with open_frontend(settings, args.chat_template, chats=True) as (frontend, runner):
        out.print(
            f"{frontend.model.names[0]}, context {frontend.model.max_model_len:,} tokens. /help, Ctrl-D leaves."
        )
        session = _session() if sys.stdin.isatty() else None
        while (line := _read_message(session, runner)) is not None:
            message = _command(line, conversation) if line.startswith("/") else line
            if message is None:
                continue
            if message == "/exit":
                break
            conversation.turns.append({"role": "user", "content": message})
            try:
                answer, ended = runner.run(_answer(frontend, conversation, sampling))
            except QuireError as error:
                conversation.turns.pop()
                out.print(f"[red]{error}[/red]")
                continue
            out.print("")
            if sys.stdout.isatty():
                out.print(ended, style="dim", markup=False)
            conversation.turns.append({"role": "assistant", "content": answer})
    return 0


def _set_values(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


async def _answer(
    frontend: Frontend, conversation: Conversation, sampling: dict[str, Any]
) -> tuple[str, str]:
    """Render, submit and print the answer; return it and how it ended.

    Where the context is full, the oldest exchange is dropped, and the terminal says so.
    """
    while True:
        _, ids = await frontend.prompts.chat(conversation.messages, add_generation_prompt=True)
        room = frontend.model.max_model_len - len(ids)
        if room > 0 or len(conversation.turns) < 3:
            break
        del conversation.turns[:2]
        out.print("[dim](the context is full: the oldest exchange was dropped)[/dim]")
    if room < 1:
        raise RequestError(
            f"the message takes {len(ids)} of {frontend.model.max_model_len} tokens: shorten it"
        )
    params = frontend.model.sampling(**{**sampling, "max_tokens": min(sampling["max_tokens"], room)})
    end = AnswerEnd(WallClock().now())
    stream = await frontend.submit(ids, params, adapter=named_adapter(frontend))
    if not sys.stdout.isatty():
        answer, stopped = await print_stream(stream, end=end)
    else:
        wrapped = WordWrap(sys.stdout.write, lambda: shutil.get_terminal_size().columns)
        answer, stopped = await print_stream(stream, wrapped.feed, end)
        wrapped.close()
    limit = params.max_tokens or room
    return answer, end.line(stopped=stopped, max_tokens=limit, fills_context=limit == room)


def _command(line: str, conversation: Conversation) -> str | None:
    """Carry out a /command; return the message for the model, "/exit", or None."""
    name, _, rest = line.partition(" ")
    if name == "/exit":
        return "/exit"
    if name == "/retry":
        last = conversation.undo()
        if last is None:
            out.print("[dim]nothing to retry[/dim]")
        return last
    if name in ("/reset", "/system"):
        conversation.turns.clear()
        if name == "/system":
            conversation.system = rest.strip() or None
        out.print("[dim]a new conversation[/dim]")
    elif name == "/undo":
        note = "taken back" if conversation.undo() is not None else "nothing to take back"
        out.print(f"[dim]{note}[/dim]")
    elif name == "/save" and rest.strip():
        try:
            text = json.dumps(conversation.messages, indent=1, ensure_ascii=False)
            Path(rest.strip()).write_text(f"{text}\n")
            out.print(f"[dim]written to {rest.strip()}[/dim]")
        except OSError as error:
            out.print(f"[red]{rest.strip()}: {error.strerror}[/red]")
    else:
        out.print(HELP, markup=False)
    return None


def _session() -> PromptSession[str]:
    """Return the line editor: several lines, pasted text as one message, a history."""
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    # Not Ctrl-J: an Enter that is typed during an answer arrives as one, and sends.
    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _clear(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    return PromptSession(
        FormattedText([("bold", "› ")]),
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        history=InMemoryHistory(),
    )


def _read_message(session: PromptSession[str] | None, runner: asyncio.Runner) -> str | None:
    """Return the next message that is not empty; None at the end. Without a terminal, a line is a message."""
    while True:
        try:
            text = input() if session is None else runner.run(session.prompt_async())
        except EOFError:
            return None
        except KeyboardInterrupt:
            continue
        if text.strip():
            return text.strip()
