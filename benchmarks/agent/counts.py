"""What the scheduler and the cache let an agent's turns compute again, without a model.

    python -m benchmarks.agent.counts

The trace is that of `benchmarks.agent.run`, in tokens: an agent of 20 turns that grows to 30,000, and a chat in
between. Each answer of the agent comes back with its first 18 tokens as they were and the others written otherwise, as
a template writes a call. A fake executor stands for the model, so the counts are exact and the same on every machine.
"""

from __future__ import annotations

import random

from tests.fakes.executor import FakeDrafts
from tests.scheduler.harness import MODEL, Engine, oracle, request

from quire.config import CacheConfig, SchedulerConfig
from quire.cost.states import PER_SEQUENCE
from quire.scheduler.scheduler import Scheduler

SIZE, NUM_TURNS, MAX_SEQS = 16, 20, 2
# Of the agent and of the chat: tokens that a turn adds, of an answer, and of it that come back as they were.
AGENT, CHAT = (1450, 44, 18), (230, 24, 24)


def run(num_blocks: int, num_checkpoints: int, *, drops: bool) -> tuple[list[int], list[int]]:
    """Return what each turn of the agent and of the chat computes beyond its new tokens.

    ``drops``: each turn but every fourth adds thinking of 60 tokens, which the next task's prompt leaves out.
    """
    cache = CacheConfig(num_blocks, SIZE, num_states=MAX_SEQS, num_checkpoints=num_checkpoints)
    config = SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=512, max_model_len=40_000)
    engine = Engine(Scheduler(config, cache), in_flight=1, drafts=FakeDrafts(0, 0.0, seed=0))
    rng = random.Random(45)
    seen: list[tuple[int, ...]] = []
    again: dict[str, list[int]] = {"agent": [], "chat": []}
    parts: dict[str, list[tuple[bool, list[int]]]] = {name: [(False, tokens(rng, 700))] for name in again}
    for turn in range(NUM_TURNS):
        for name, (grows, answers, keeps) in (("agent", AGENT), ("chat", CHAT)):
            mine = parts[name]
            if drops and name == "agent" and turn % 4 == 0:
                mine[:] = [part for part in mine if not part[0]]
            mine.append((False, tokens(rng, grows)))
            prompt = tuple(token for _, part in mine for token in part)
            one = request(f"{name} {turn}", prompt, max_tokens=answers)
            engine.put([one])
            engine.run()
            timing = engine.end(one.request_id).timing
            assert timing is not None
            num_shared = max([0, *(shared(prompt, text) for text in seen)])
            again[name].append(num_shared - timing.num_cached_tokens)
            answer = oracle(one)
            seen.append((*prompt, *answer))
            if drops and name == "agent":
                mine.append((True, tokens(rng, 60)))
            mine.append((False, [*answer[:keeps], *tokens(rng, answers - keeps)]))
    return again["agent"], again["chat"]


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(MODEL.vocab_size) for _ in range(count)]


def shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the longest prefix that both have."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next(i for i in range(size) if one[i] != other[i])


def main() -> None:
    print("| template | cache | checkpoints | agent: most, of all | chat: most, of all |")
    print("|---|---|---|---|---|")
    for drops in (False, True):
        for what, blocks in (("both fit", 2400), ("the agent alone fits", 1990)):
            for num_checkpoints in (PER_SEQUENCE * MAX_SEQS, PER_SEQUENCE * 8):
                agent, chat = run(blocks, num_checkpoints, drops=drops)
                print(
                    f"| {'drops thinking' if drops else 'keeps all'} | {what} | {num_checkpoints} | "
                    f"{max(agent):,}, {sum(agent):,} | {max(chat):,}, {sum(chat):,} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
