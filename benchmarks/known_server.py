"""A server whose timing is known: python benchmarks/known_server.py LOG.jsonl [--step-ms 20] [--free]

It implements as much of OpenAI's completions API as load generators need, on a free port that it prints. A
request waits for the next step to begin, like in an engine with continuous batching, and gets its first token when that
step is over; `--free`: its steps begin when it arrives. For each request it writes the first part of the URL's path
(http://…/NAME/v1/completions, to tell clients apart), when the request was read, when its first token was written, and
when its last one was: the truth that a client's figures are compared with. It has nothing to do between.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any, TextIO

CHUNK = b"%x\r\n%b\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"


class Steps:
    """Yield the ends of steps, without end."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._start_s = time.monotonic()

    async def after(self, since_s: float, num: int) -> None:
        """Wait for the end of the ``num``-th step that begins after ``since_s``."""
        begun = int((since_s - self._start_s) / self.step_s) + 1
        await _until(self._start_s + (begun + num) * self.step_s)


async def _until(when_s: float) -> None:
    """Wait until a time. A timer may be a millisecond late; the log has the time at which a token was written."""
    await asyncio.sleep(max(0.0, when_s - time.monotonic()))


def _event(index: int, finish: str | None, chat: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "token_ids": [index % 80 + 25]}
    choice |= {"delta": {"content": f" w{index}"}} if chat else {"text": f" w{index}"}
    return (
        b"data: %b\n\n" % json.dumps({"id": "x", "object": "text_completion", "choices": [choice]}).encode()
    )


class Server:
    """Answers requests and logs their times."""

    def __init__(self, steps: Steps, free: bool, log: TextIO) -> None:
        self._steps, self._free, self._log = steps, free, log

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                path, length = line.split()[1].decode(), 0
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                body = await reader.readexactly(length)
                if path.endswith("/completions"):
                    await self._complete(path.split("/")[1], json.loads(body), writer)
                else:
                    text = json.dumps(
                        {"object": "list", "data": [{"id": "tiny", "object": "model"}]}
                    ).encode()
                    writer.write(
                        HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(text) + text
                    )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, client: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        read_s, num = time.monotonic(), body.get("max_tokens") or body["max_completion_tokens"]
        prompt, chat = body.get("prompt", ""), "messages" in body
        num_prompt = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        writer.write(HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
        first_s = 0.0
        for index in range(num):
            if self._free:
                await _until(read_s + (index + 2) * self._steps.step_s)
            else:
                await self._steps.after(read_s, index + 1)
            event = _event(index, "length" if index == num - 1 else None, chat)
            first_s = first_s or time.monotonic()
            writer.write(CHUNK % (len(event), event))
        last_s = time.monotonic()
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num, "total_tokens": num_prompt + num}
        event = (
            b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"id": "x", "choices": [], "usage": usage}).encode()
        )
        writer.write(CHUNK % (len(event), event) + CHUNK % (0, b""))
        note = {"client": client, "tokens": num, "read_s": read_s, "first_s": first_s, "last_s": last_s}
        print(json.dumps(note), file=self._log, flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--free", action="store_true")
    args = parser.parse_args()
    with open(args.log, "a") as log:
        server = await asyncio.start_server(
            Server(Steps(args.step_ms / 1e3), args.free, log).serve, "127.0.0.1", 0, limit=2**20
        )
        print(f"server ready url=http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
