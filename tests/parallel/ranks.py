"""Several ranks on this machine, for tests: rank 0 in this process, the others in processes that live for the session.

Every rank executes every plan and samples; their results must be equal, since all have the same bits.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from quire.clock import VirtualClock
from quire.config import EngineConfig, ExpertsConfig
from quire.kernels.collective.native import attach
from quire.kernels.threads import choose_threads
from quire.layers.context import context_parallel
from quire.layers.weights import tensor_parallel
from quire.metrics.engine_stats import LayerLoad
from quire.models.loader import iter_weights
from quire.modelspec import weight_shapes
from quire.parallel.rotations import rotated
from quire.parallel.segment import Segment, remove
from quire.parallel.shard import shard
from quire.parallel.topology import Topology
from quire.runner.expert_balance import ExpertBalancer
from quire.runner.memory import torch_dtype
from quire.runner.model_runner import ModelRunner, rank_config
from quire.runner.worker import Worker
from quire.step import StepPlan, StepResult

LIMIT_S = 120.0  # a busy machine may stop a rank for long
_names = itertools.count()


def build(config: EngineConfig, segment: Segment, rank: int) -> Worker:
    """Return the worker of ``rank``."""
    choose_threads(config.runner.num_threads, torch_is_heavy=config.runner.backend == "reference")
    model = config.model
    mine = shard(model.spec, segment.topology, rank, model.formats)
    groups = attach(segment, rank, LIMIT_S)
    weights = iter_weights(model, torch_dtype(model.dtype), cuts=mine.cuts)
    cp = context_parallel(groups, mine, config.cache.block_size)
    runner = partial(ModelRunner, tp=tensor_parallel(groups, mine), cp=cp)
    worker = Worker(rank_config(config, mine), weights, VirtualClock(), runner, shard=mine)
    is_even = all(shape[-1] % 2 == 0 for shape in weight_shapes(model.spec).values() if len(shape) > 1)
    if config.runner.backend != "reference" and is_even:  # the rows of odd matrices are padded by torch
        assert worker.runner.tape is not None, "a rank's steps run call by call"
    if config.experts is not None:
        _balance(worker, config.experts)
    return worker


def _balance(worker: Worker, config: ExpertsConfig) -> None:
    """Let ``worker`` balance its experts before its steps, as the process of a rank does."""
    worker.loads = []  # type: ignore[attr-defined]
    blocks, execute = worker.runner.decoder.expert_blocks(), worker.execute
    balancer = ExpertBalancer(blocks, config, 1, worker.loads.append)  # type: ignore[attr-defined]

    def balanced(plan: StepPlan) -> StepResult:
        balancer.before_step()
        return execute(plan)

    worker.execute = balanced  # type: ignore[method-assign]


def _serve(connection: Connection) -> None:
    """The loop of a helper: build a worker, execute plans, call functions, until the connection closes."""
    worker: Worker | None = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        try:
            if isinstance(message, StepPlan):
                assert worker is not None
                connection.send(worker.execute(message))
            elif message is None:
                worker = None
            elif len(message) == 2:
                function, rank = message
                connection.send(function(rank))
            else:
                name, topology, rank, config, std = message
                if std is not None:
                    from quire.models import loader

                    loader.STD = std
                worker = build(config, Segment.attach(name, topology), rank)
                connection.send("built")
        except Exception:
            connection.send(RuntimeError(traceback.format_exc()))


class Helpers:
    """Processes that are started once, since each imports torch."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._started: list[tuple[Any, Connection]] = []

    def connections(self, count: int) -> list[Connection]:
        while len(self._started) < count:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._started.append((process, ours))
        return [connection for _, connection in self._started[:count]]

    def answer(self, connection: Connection) -> Any:
        """Wait for what a helper returns; raises what it raised."""
        assert connection.poll(LIMIT_S), "a rank does not answer"
        answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        for process, connection in self._started:
            connection.close()
            process.join(10)
            process.kill()


class RankedWorker:
    """As `Worker`: a group of them. ``runner`` is rank 0's."""

    def __init__(
        self, config: EngineConfig, topology: Topology, helpers: Helpers, std: float | None = None
    ) -> None:
        self.segment = Segment.create(f"quire-test-{os.getpid()}-{next(_names)}", topology)
        try:
            self._helpers = helpers
            self._others = helpers.connections(topology.world_size - 1)
            for rank, connection in enumerate(self._others, 1):
                connection.send((self.segment.name, topology, rank, config, std))
            self._worker = build(config, self.segment, 0)
            for connection in self._others:
                helpers.answer(connection)
        finally:
            remove(self.segment.name)
        self.runner, self.seqs = self._worker.runner, self._worker.seqs
        self.loads: list[LayerLoad] = getattr(self._worker, "loads", [])
        self.drafting = self._worker.drafting

    def execute(self, plan: StepPlan) -> StepResult:
        for connection in self._others:
            connection.send(plan)
        result = self._worker.execute(plan)
        for connection in self._others:
            other = self._helpers.answer(connection)
            assert other.seqs == result.seqs, (other.seqs, result.seqs)
        return result

    def close(self) -> None:
        for connection in self._others:
            with suppress(OSError):
                connection.send(None)


@contextmanager
def ranked(
    config: EngineConfig, topology: Topology, helpers: Helpers, std: float | None = None
) -> Iterator[RankedWorker]:
    worker = RankedWorker(config, topology, helpers, std)
    try:
        yield worker
    finally:
        worker.close()


class RankedExecutor:
    """As `LocalExecutor`, over ranks."""

    max_in_flight = 1
    chains_steps = True

    def __init__(
        self, config: EngineConfig, topology: Topology, helpers: Helpers, std: float | None = None
    ) -> None:
        formats = rotated(config.model.spec, config.model.formats, {}, topology.tp)
        config = replace(config, model=replace(config.model, formats=formats))
        self.worker = RankedWorker(config, topology, helpers, std)
        self._pending: StepPlan | None = None

    def submit(self, plan: StepPlan) -> None:
        self._pending = plan

    def collect(self) -> StepResult:
        assert self._pending is not None
        plan, self._pending = self._pending, None
        return self.worker.execute(plan)

    def close(self) -> None:
        self.worker.close()
