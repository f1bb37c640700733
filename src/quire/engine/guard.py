"""`EngineGuard`: what a supervisor looks at while it receives from an engine: is it late, and are its answers right?

`GoldenPrompt`: a fixed prompt whose greedy continuation, or whose vector where the model is an encoder, has to be the
same at every start and while the server runs.

Generation is exact, so another token means that something is broken: memory, a kernel, a file of weights. The ids of
the first start are kept in a file of the user's cache folder, under a key of all that may change them: model, formats,
level of the kernels, and the code of the kernels. A model folder may bring its own (``golden.json``; Quill does).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quire.clock import Clock
from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.heartbeat import IDLE_TICK_S
from quire.engine.recording_file import default_folder, keep
from quire.errors import EngineDeadError, clip
from quire.metrics.log import Log
from quire.models.fingerprint import code_digest
from quire.request import FinishReason, Pooling, Request, SamplingParams, Terms, TokenEvent

NUM_PROMPT, NUM_OUTPUT = 24, 8  # tokens
FILE = "golden.json"  # in a model folder: {"prompt": […], "ids": {setup: […]}}
PREFIX = "golden/"  # begins the ids of these requests; no client can give it
_CODE = ("kernels", "layers", "models", "quant", "runner", "sampling")
log = Log("supervisor")


class GoldenPrompt:
    """The check of one server's engines. Belongs to the thread that receives."""

    def __init__(self, config: EngineConfig, folder: Path, clock: Clock, interval_s: float) -> None:
        """``folder``: where ids are kept. ``interval_s``: between two checks of an idle engine."""
        self._clock, self._interval_s = clock, interval_s
        self._prompt, spec = _prompt(config), config.model.spec
        is_encoder = spec.encoder is not None and spec.sentence is not None
        self._pooling = Pooling(spec.sentence.pooling) if is_encoder and spec.sentence else None
        self._kept = folder / f"{_key(config)}.json"
        shipped = _read(Path(config.model.path) / FILE)
        self._expected: list[float] | None = shipped.get("ids", {}).get(setup_of(config))
        self._source = "those that the model brings"
        if self._expected is not None:
            self._prompt = shipped["prompt"]
        elif config.determinism == "exact":
            self._expected = _read(self._kept).get("ids")
            self._source = f"those of the first start ({self._kept}; delete it if they were wrong)"
        self._is_exact = config.determinism == "exact"
        self._next_s = 0.0
        self._count = self._num_failures = 0
        self._ids: list[float] | None = None  # so far, or the vector, while a check runs
        self.problem: str | None = None  # why the last check failed

    @property
    def is_running(self) -> bool:
        return self._ids is not None

    def begin(self, client: EngineClient) -> None:
        """Start a check. A fresh salt keeps its prompt from being found in the prefix cache."""
        self._count += 1
        self._ids = []
        name = f"{PREFIX}{self._count}"
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT).resolve(
            seed=0, max_tokens=NUM_OUTPUT, eos_token_ids=(), bad_words_token_ids=()
        )
        request = Request(
            name,
            tuple(self._prompt),
            sampling,
            self._clock.now(),
            Terms(cache_salt=name),
            pooling=self._pooling,
        )
        client.send(request)

    def look(self, client: EngineClient, events: list[TokenEvent]) -> list[TokenEvent]:
        """Take the check's own events out of ``events``; start a check where one is due and the engine is idle.

        Raises:
            EngineDeadError: a check failed twice.
        """
        if self.is_running:
            others = [event for event in events if not event.request_id.startswith(PREFIX)]
            for event in events:
                if event.request_id == f"{PREFIX}{self._count}":
                    self._take(event, client)
            return others
        if not events and self._clock.now() >= self._next_s:
            stats = client.stats()
            if not stats.num_running and not stats.num_waiting and client.health().status == "ready":
                self.begin(client)
        return events

    def forget(self) -> None:
        """The engine is another one now."""
        self._ids, self._num_failures = None, 0

    def _take(self, event: TokenEvent, client: EngineClient) -> None:
        assert self._ids is not None
        self._ids += event.pooled or event.token_ids
        if event.finish_reason is None:
            return
        ids, self._ids = self._ids, None
        self._next_s = self._clock.now() + self._interval_s
        if event.finish_reason is not FinishReason.LENGTH and event.error_kind != "step" and not event.pooled:
            # It was refused, because the queue is full for example: that says nothing of the model.
            return
        problem = event.error
        if problem is None and self._expected is not None and ids != self._expected:
            problem = f"its ids are {clip(ids)}, and {self._source} are {clip(self._expected)}"
        if problem is None:
            self._pass(ids)
            return
        self._num_failures += 1
        self.problem = f"the golden prompt failed: {problem}"
        log.error("golden_prompt_failed", problem=problem, failures=self._num_failures)
        if self._num_failures == 2:
            raise EngineDeadError(f"The engine gives wrong answers: {self.problem}.")
        self.begin(client)

    def _pass(self, ids: list[float]) -> None:
        self.problem, self._num_failures = None, 0
        if self._expected is not None or not self._is_exact:
            return
        self._expected = ids
        try:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._kept.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps({"prompt": list(self._prompt), "ids": ids}))
            unfinished.replace(self._kept)
        except OSError as error:
            log.warning("golden_prompt_not_kept", error=error)


def golden_folder() -> Path:
    """Return the folder of the ids that are kept: ``$XDG_CACHE_HOME/quire/golden``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "quire" / "golden"


def setup_of(config: EngineConfig) -> str:
    """Return in one word how a model runs, as a key of `FILE`: kernels, types, formats."""
    model = config.model
    return "/".join(
        (config.device.kind, config.runner.kernels, model.dtype, model.kv_dtype, model.quantize or "-")
    ) + "".join(f"/{axis}{size}" for axis in ("tp", "cp") if (size := getattr(config.topology, axis)) > 1)


def _prompt(config: EngineConfig) -> list[int]:
    """Return ids from all over the vocabulary, that fit the context."""
    size = config.model.spec.vocab_size
    count = max(1, min(NUM_PROMPT, config.model.max_model_len - NUM_OUTPUT - 1))
    return [(7 + 1009 * i) % size for i in range(count)]


def _key(config: EngineConfig) -> str:
    """Return a digest of all that ids may depend on."""
    model, digest = config.model, hashlib.blake2b(digest_size=12)
    scope = (
        config.cache.model_key, model.path, model.seed, model.max_model_len, setup_of(config),
        config.cache.block_size, config.runner.batch_invariant, config.device.name, version("torch"),
    )  # fmt: skip
    digest.update(repr(scope).encode() + code_digest(_CODE).encode())
    return digest.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        values = json.loads(path.read_text())
        if isinstance(values, dict):
            return values
    return {}


class EngineGuard:
    """Receives from an engine, and looks whether it hangs and whether its answers are right.

    ``timeout_s``: beyond the predicted end of a step; 0: no engine is given up for being late.
    """

    def __init__(self, timeout_s: float, golden: GoldenPrompt | None = None) -> None:
        self._timeout_s = timeout_s
        self._golden = golden
        self._is_hung = self._has_dump = False

    @property
    def problem(self) -> str | None:
        """What is wrong with the engine's answers."""
        return None if self._golden is None else self._golden.problem

    def check(self, client: EngineClient) -> None:
        """Wait until the golden prompt has passed in an engine that has just loaded, and has no requests.

        Raises:
            EngineDeadError: it failed twice, or the engine died of it.
        """
        if self._golden is None:
            return
        self._golden.forget()
        self._golden.begin(client)
        while self._golden.is_running and client.health().status != "dead":
            self.receive(client, None)

    def receive(self, client: EngineClient, timeout_s: float | None) -> list[TokenEvent]:
        """As `EngineClient.receive`, for `IDLE_TICK_S` at most.

        Raises:
            EngineDeadError: the engine has died, or is to be replaced, since it was late for too long or gives wrong
                answers.
        """
        events = self._receive(client, timeout_s)
        return events if self._golden is None else self._golden.look(client, events)

    def _receive(self, client: EngineClient, timeout_s: float | None) -> list[TokenEvent]:
        events = client.receive(IDLE_TICK_S if timeout_s is None else min(timeout_s, IDLE_TICK_S))
        health = client.health()
        if health.status != "hung":
            if self._is_hung and health.status == "ready":
                log.warning("engine_goes_on")
            self._is_hung = False
            return events
        if not self._is_hung:
            self._is_hung = True
            log.error("engine_hangs", reason=health.reason)
            self._has_dump = _dump(client, is_last=False)
        if self._timeout_s and health.overdue_s >= self._timeout_s and not events:
            self._is_hung = False
            if not self._has_dump:
                _dump(client, is_last=True)
            raise EngineDeadError(f"The engine hung and was killed: {health.reason}.")
        return events


def _dump(client: EngineClient, *, is_last: bool) -> bool:
    """Keep what a hung engine says of itself; return whether it said anything."""
    dump = client.dump(is_last=is_last)
    log.error("engine_dump", file=keep_dump(dump))
    return bool(dump)


def keep_dump(dump: str) -> str:
    """Write what a hung engine said to a file next to the recordings; return its path, or why there is none."""
    if not dump:
        return "none: the process is stopped, or does not answer signals"
    try:
        path = keep(default_folder(), f"{os.getpid()}-hang.txt", dump.encode(), datetime.now(UTC))
    except OSError as error:
        return f"none: {error}"
    return str(path)
