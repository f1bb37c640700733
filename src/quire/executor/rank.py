"""A rank's process: ``python -m quire.executor.rank RANK MEMORY CHANNEL LIFE BEFORE AFTER STORE``.

It loads its part of the model and computes every plan that the executor sends. The answering rank samples and answers;
the others are told with a later plan what it sampled. Whatever is no fault of the plan itself ends the process, and
with it the group: other ranks may wait for this one in the middle of a step.

MEMORY is the name of the node's shared memory, or empty. The others are descriptors of sockets: BEFORE and AFTER lead
to the stages beside it, and STORE listens for the ranks on other nodes; −1: there is none. The process ends when its
end of LIFE closes, whatever it computes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from setproctitle import setproctitle

from quire.clock import WallClock
from quire.config import EngineConfig
from quire.cores import usable_cpus
from quire.errors import ModelLoadError, QuireError, StepError
from quire.executor.base import RankLoaded, failed
from quire.executor.child_process import PrefixedStream, wake_at_parents_end
from quire.executor.rank_messages import (
    Answer,
    Channel,
    RankBoot,
    RankCounts,
    RankFailure,
    RankStep,
    Told,
    encode,
)
from quire.kernels.collective import Collectives
from quire.kernels.collective.distributed import connect
from quire.kernels.collective.native import attach
from quire.kernels.registry import in_words
from quire.kernels.threads import QUIET_S, BetweenSteps, choose_threads
from quire.layers.context import context_parallel
from quire.layers.weights import tensor_parallel
from quire.metrics.engine_stats import LayerLoad
from quire.metrics.log import configure
from quire.models.checkpoint import describe
from quire.models.fingerprint import fingerprint
from quire.models.packed_cache import CheckpointWeights
from quire.parallel.placement import place
from quire.parallel.segment import Segment, remove
from quire.parallel.shard import shard
from quire.recording_signal import pass_recording_signal_on
from quire.runner.expert_balance import ExpertBalancer
from quire.runner.memory import PagesAhead, keep_freed_memory, torch_dtype
from quire.runner.model_runner import ModelRunner, rank_config
from quire.runner.stage_links import StageLinks
from quire.runner.worker import Launched, Worker
from quire.sampling.draft_tree import NO_DRAFTS
from quire.step import SeqTold, StepPlan, StepResult


def main(argv: list[str]) -> None:
    """Run until the executor goes away, or a step fails for another reason than its plan."""
    rank, memory = int(argv[1]), argv[2]
    channel_fd, life_fd, *links = map(int, argv[3:8])
    setproctitle(f"quire: rank {rank}")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # for the server to handle: it drains
    pass_recording_signal_on()
    wake_at_parents_end()
    threading.Thread(target=_end_with_parent, args=(life_fd, memory), daemon=True).start()
    stderr = sys.stderr
    faulthandler.register(signal.SIGUSR1, file=stderr, all_threads=True)
    sys.stderr = sys.stdout = PrefixedStream(stderr, f"rank {rank}")
    channel = Channel(socket.socket(fileno=channel_fd))
    boot = channel.receive()
    if boot is None:
        return
    assert isinstance(boot, RankBoot)
    configure(boot.log_level, stream=stderr if boot.log_format == "json" else None, style=boot.log_format)
    try:
        RankLoop(boot, channel, [None if fd < 0 else socket.socket(fileno=fd) for fd in links]).run()
    except OSError as error:
        # Usually a socket's error: another process has ended.
        _fail(channel, error)
    except Exception as error:
        if not isinstance(error, QuireError):
            traceback.print_exc()
        _fail(channel, error)


class RankLoop:
    """The worker of a rank, and the steps that it has computed without knowing what was sampled."""

    def __init__(self, boot: RankBoot, channel: Channel, links: Sequence[socket.socket | None]) -> None:
        """Load the rank's part of the model, and say so."""
        config, clock = boot.config, WallClock()
        self._clock, self._busy_s, self._num_steps = clock, 0.0, 0
        start_s = clock.now()
        if boot.cores and hasattr(os, "sched_setaffinity"):  # Linux
            os.sched_setaffinity(0, boot.cores)
        choose_threads(config.runner.num_threads, torch_is_heavy=config.runner.backend == "reference")
        keep_freed_memory()
        self._channel = channel
        self._answers = boot.rank == config.topology.answering_rank
        self._is_alone = config.topology.world_size == 1
        model, dtype = config.model, torch_dtype(config.model.dtype)
        if boot.fingerprint:
            _check_checkpoint(Path(model.path), boot.fingerprint)
        part = shard(model.spec, config.topology, boot.rank, model.formats)
        max_tokens = config.scheduler.max_num_batched_tokens
        before, after, store = links
        num_taps = sum(tap < part.layers.start for tap in config.taps)
        self._links = StageLinks(before, after, max_tokens, model.spec.hidden_size, dtype, clock, num_taps)
        groups = _groups(boot, store)
        self._groups = groups
        tp = tensor_parallel(groups, part)
        runner = partial(
            ModelRunner, tp=tp, cp=context_parallel(groups, part, config.cache.block_size),
            links=self._links, samples=self._answers,
        )  # fmt: skip
        weights = CheckpointWeights(model, dtype, config.runner, part.cuts)
        weight_bytes = part.weight_bytes(model.dtype, model.formats)
        with _in_memory(weight_bytes):
            self.worker = Worker(
                rank_config(config, part), weights, clock, runner, answers=self._answers, shard=part,
                all_of=lambda fine: self._links.all_of(groups.all_of(fine)),
            )  # fmt: skip
        self._balancer: ExpertBalancer | None = None
        if config.experts is not None:
            self._balancer = ExpertBalancer(
                self.worker.runner.decoder.expert_blocks(), config.experts, _num_nodes(config),
                partial(self._report, part.layers.start, is_first=part.at.ep == 0),
            )  # fmt: skip
        self._out: deque[Launched | int] = deque()  # a number: the step whose plan was at fault
        assert isinstance(self.worker.runner, ModelRunner)
        loaded = RankLoaded(
            boot.rank, os.getpid(), in_words(config.runner), weight_bytes, clock.now() - start_s,
            socket.gethostname(), len(usable_cpus()), self.worker.runner.call_by_call,
        )  # fmt: skip
        channel.send(encode(loaded))
        self._between = BetweenSteps(clock)
        if weights.saver is not None and config.experts is None:  # experts may be moved
            weights.saver.start(self._between)
        self._pages = PagesAhead(self.worker.runner.kv, self._between, max_tokens)
        self._pages.look()
        if config.runner.prepares_grammars and self._answers:
            eos = config.model.spec.eos_token_ids
            self.worker.runner.grammars.prepare(eos, partial(self._between.wait, QUIET_S))

    def run(self) -> None:
        """Compute plans until the executor closes its end."""
        while (message := self._channel.receive()) is not None:
            assert isinstance(message, RankStep)
            start_s, waited_s = self._clock.now(), self._links.waited_s
            self._between.step_begins()
            if self._balancer is not None:
                self._balancer.before_step()
            if self._answers:
                answer = self._answer(message.plan)
            else:
                for outcome in message.told:
                    self._settle(outcome)
                self._out.append(self._launch(message.plan))
            self._between.step_ended()
            self._pages.look()
            self._busy_s += self._clock.now() - start_s - (self._links.waited_s - waited_s)
            self._num_steps += 1
            sent = self._links.num_bytes_sent + self._groups.bytes_sent
            counts = RankCounts(self._busy_s, self._num_steps, sent, _peak_bytes())
            self._channel.send(encode(counts))
            if self._answers:
                self._channel.send(encode(answer))

    def _report(self, first_layer: int, load: LayerLoad, *, is_first: bool) -> None:
        if is_first:
            self._channel.send(encode(load._replace(layer=first_layer + load.layer)))

    def _answer(self, plan: StepPlan) -> Answer:
        try:
            result = self.worker.execute(plan)
        except Exception as error:
            if not self._is_alone and not isinstance(error, StepError):
                raise
            return Answer(failed(plan, error), Told(plan.step, failed=True))
        return Answer(result, self._told(result))

    def _told(self, result: StepResult) -> Told:
        if self._is_alone:
            return Told(result.step)
        seqs = []
        for answer in result.seqs:
            if answer.token_ids or answer.error is not None:
                seq = self.worker.seqs.find(answer.seq_id)
                drafts = NO_DRAFTS if seq is None or seq.drafting is None else seq.drafting.drafts
                failed = answer.error is not None
                outcome = SeqTold(
                    answer.seq_id, answer.epoch, answer.token_ids, drafts.token_ids, drafts.parents, failed
                )
                seqs.append(outcome)
        return Told(result.step, tuple(seqs))

    def _launch(self, plan: StepPlan) -> Launched | int:
        try:
            return self.worker.launch(plan)
        except StepError:  # the answering rank refuses this plan as well
            return plan.step

    def _settle(self, told: Told) -> None:
        launched = self._out.popleft()
        if isinstance(launched, int):
            assert launched == told.step
        else:
            assert launched.plan.step == told.step
            self.worker.settle(launched, {outcome.seq_id: outcome for outcome in told.seqs})


def _peak_bytes() -> int:
    """Return the resident memory of this process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _num_nodes(config: EngineConfig) -> int:
    """Return over how many nodes the experts lie: machines, or memory nodes of this one."""
    machines = 1 if config.ray is None else place(config.topology, config.ray.nodes).num_nodes("ep")
    return machines if machines > 1 else config.device.num_nodes


def _groups(boot: RankBoot, store: socket.socket | None) -> Collectives:
    """Return the groups that the rank exchanges with: on its node in shared memory, across nodes over Gloo."""
    topology, meeting, collectives = boot.config.topology, boot.meeting, Collectives()
    if boot.memory:
        crossing = () if meeting is None else meeting.axes
        collectives = attach(Segment.attach(boot.memory, topology), boot.rank, without=crossing)
    if meeting is None:
        return collectives
    across = connect(meeting, topology, boot.rank, store)
    return Collectives({**collectives.groups, **across})


@contextlib.contextmanager
def _in_memory(weight_bytes: int) -> Iterator[None]:
    """Make one line of what Python, torch and the system raise where memory does not suffice."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        raise ModelLoadError(
            f"it ran out of memory on {socket.gethostname()} while it loaded its {weight_bytes / 2**30:.2f} GiB of "
            "weights: give more ranks or nodes, or hold them in a smaller format (--quantize)"
        ) from error


def _check_checkpoint(path: Path, expected: str) -> None:
    actual = fingerprint(describe(path))
    if actual != expected:
        raise ModelLoadError(
            f"the checkpoint {path} on {socket.gethostname()} has the fingerprint {actual}, and the engine's has "
            f"{expected}: copy the same files to every node"
        )


def _fail(channel: Channel, error: Exception) -> None:
    text = " ".join(str(error).split())
    line = text if isinstance(error, QuireError) else f"{type(error).__name__}: {text}"
    with contextlib.suppress(OSError):  # the executor has gone, so there is nothing to report to
        channel.send(encode(RankFailure(type(error).__name__, line)))
    raise SystemExit(1)


def _end_with_parent(life_fd: int, memory: str) -> None:
    with contextlib.suppress(OSError):
        socket.socket(fileno=life_fd).recv(1)
    remove(memory)  # the parent may have been killed before it could
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv)
