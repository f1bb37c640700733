"""Prompts and decode steps per second of the forms of a model, and of its peers, in turns: `benchmarks.fidelity speed`.

One thread, and its processor time. A prompt is 512 tokens of the text in one step, with the logits of its last token;
decode is 64 steps of one token, with the logits of each: given tokens for peers, and for Quire those that its engine
samples greedily, its scheduler and sampler included. The forms take turns, round by round, after a round that does not
count; the figures are medians.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from quire.clock import WallClock
from quire.engine.build import make_executor
from quire.engine.core import EngineCore
from quire.models.loader import iter_weights
from quire.request import Request, SamplingParams
from quire.runner.memory import torch_dtype
from quire.scheduler.scheduler import Scheduler
from quire_lab.eval.model import FoundModel

PROMPT, STEPS = 512, 64  # tokens
PEERS = Path(__file__).parent / "peers"


class Timed(Protocol):
    """Something whose prompts and decode steps take seconds of processor time."""

    def prompt_s(self, ids: Sequence[int]) -> float:
        """Compute a prompt."""

    def steps_s(self, ids: Sequence[int]) -> float:
        """Compute tokens one by one."""


class TimedModel:
    """A form of Quire's: an engine's core with one sequence at a time."""

    def __init__(self, found: FoundModel) -> None:
        config = found.config
        groups = len(config.kv_layout.groups)
        num_blocks = groups * (-(-PROMPT // config.cache.block_size) + 2)
        cache = replace(config.cache, num_blocks=num_blocks, enable_prefix_caching=False)
        # The prompt is one step, and one sequence is all that there ever is.
        scheduler = replace(config.scheduler, max_num_seqs=1, max_num_batched_tokens=PROMPT)
        config = replace(config, cache=cache, scheduler=scheduler)
        weights = None
        if found.expanded:
            plain = replace(config.model, formats={})
            weights = iter_weights(plain, torch_dtype(plain.dtype))
        clock = WallClock()
        executor = make_executor(config, "local", clock, weights=weights)
        self._core = EngineCore(Scheduler(config.scheduler, config.cache), executor, clock)

    def _seconds(self, ids: Sequence[int], num_tokens: int) -> float:
        """Return the processor time of sampling ``num_tokens`` after ``ids``."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
        started_s = time.process_time()
        self._core.put(Request("timed", tuple(ids), sampling, 0.0))
        sampled = 0
        while self._core.has_work:
            sampled += sum(len(event.token_ids) for event in self._core.step())
        assert sampled == num_tokens, (sampled, num_tokens)
        return time.process_time() - started_s

    def prompt_s(self, ids: Sequence[int]) -> float:
        """Compute a prompt."""
        return self._seconds(ids, 1)

    def steps_s(self, ids: Sequence[int]) -> float:
        """Compute as many tokens as ``ids`` has, one by one."""
        return self._seconds(ids[:1], len(ids))


class Child:
    """A peer in a process of its own (benchmarks/peers/child.py)."""

    def __init__(self, python: str, script: str, model: Path, context: int) -> None:
        command = [python, str(PEERS / script), str(model), str(context)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def ask(self, want: str, ids: Sequence[int]) -> tuple[dict[str, Any], bytes]:
        """Return the head of the answer, and the bytes of logits.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the empty answer says
            self._child.stdin.write(json.dumps({"want": want, "ids": list(ids)}).encode() + b"\n")
            self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._child.args!r} ended with status {self._child.wait()}")
        head = json.loads(line)
        return head, self._child.stdout.read(4 * head.get("rows", 0) * head.get("vocab_size", 0))

    def prompt_s(self, ids: Sequence[int]) -> float:
        """Compute a prompt."""
        return float(self.ask("prompt", ids)[0]["seconds"])

    def steps_s(self, ids: Sequence[int]) -> float:
        """Compute tokens one by one."""
        return float(self.ask("steps", ids)[0]["seconds"])

    def close(self) -> None:
        """End the process."""
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        self._child.wait()


def speeds(timed: Mapping[str, Timed], ids: Sequence[int], rounds: int) -> dict[str, dict[str, float]]:
    """Return name → tokens/s of prompts and of decode, medians of ``rounds`` after one that does not count."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in timed}
    for number in range(rounds + 1):
        for name, one in timed.items():
            prompt_s, steps_s = one.prompt_s(ids[:PROMPT]), one.steps_s(ids[:STEPS])
            if number:
                found[name][0].append(PROMPT / prompt_s)
                found[name][1].append(STEPS / steps_s)
    return {
        name: {
            "prompt_tokens_per_s": statistics.median(prompts),
            "decode_tokens_per_s": statistics.median(decodes),
            "rounds": rounds,
        }
        for name, (prompts, decodes) in found.items()
    }
