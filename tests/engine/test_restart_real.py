"""A killed engine with a real model: the tokens of its streams equal an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire.engine.assemble import configure, load_text
from quire.engine.frontend import Frontend
from quire.engine.output import OutputChunk
from quire.engine.process import ProcessClient
from quire.engine.supervisor import RestartPolicy, Supervisor
from quire.request import SamplingParams

PROMPTS = ["Once upon a time", "The captain", "It was a dark night", "She said"]


@pytest.mark.slow
def test_quill_goes_on_after_sigkill() -> None:
    args = EngineArgs(num_kv_blocks=256, max_model_len=512, threads=1)
    config, checkpoint = configure(args, detect_device())
    text = load_text(args, config, checkpoint)
    params = [
        SamplingParams(max_tokens=400, ignore_eos=True, seed=i, n=1 + i % 2, temperature=0.9, logprobs=1)
        for i in range(len(PROMPTS))
    ]

    async def main() -> None:
        started: list[ProcessClient] = []

        def start() -> ProcessClient:
            started.append(ProcessClient(config))
            return started[-1]

        supervisor = Supervisor(start(), start, WallClock(), RestartPolicy(backoff_s=0.0))
        frontend = Frontend(supervisor, text.tokenizer, text.chat_template, text.model, WallClock())
        await frontend.start()

        async def ask(index: int) -> tuple[OutputChunk, ...]:
            return await (await frontend.submit(PROMPTS[index], params[index])).collect()

        async def kill() -> None:
            while supervisor.stats().num_generated_tokens < 20:
                await asyncio.sleep(0.05)
            os.kill(started[0].pid, signal.SIGKILL)

        killing = asyncio.ensure_future(kill())
        disturbed = await asyncio.gather(*[ask(i) for i in range(len(PROMPTS))])
        await killing
        assert supervisor.num_restarts == 1
        assert disturbed == await asyncio.gather(*[ask(i) for i in range(len(PROMPTS))])
        await frontend.close()

    asyncio.run(main())
