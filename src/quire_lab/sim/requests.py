"""`Client`: sends the requests of a workload and records their results, as `quire_lab.bench.client` does over HTTP."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import sub

from quire.args import defaults
from quire.cache.prefix_cache import extend_chain, root_hash
from quire.config import CacheConfig
from quire.executor.timed import sampled_token
from quire.request import Request, SamplingParams, TokenEvent
from quire_lab.bench.args import ServeBenchArgs
from quire_lab.bench.summary import CANCELLED, ERROR, OK, RequestRecord
from quire_lab.workload.request import PromptMaker, Workload, WorkloadRequest

# Made-up prompts, like those of `quire bench serve`.
VOCAB_SIZE, FIRST_ID = defaults(ServeBenchArgs)["vocab_size"], 256


@dataclass(slots=True)
class Sent:
    """A request in flight."""

    source: WorkloadRequest
    request: Request
    due_s: float  # the intended send time
    sent_s: float
    chain: list[bytes]  # hashes of the prompt's full blocks, if the router uses them
    replica: int | None = None
    token_times: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_retries: int = 0
    placed_s: float = 0.0  # at the last replica
    handed_over: bool = False  # its prompt was computed by another replica than decodes


class Client:
    """Sends requests and collects records. A later turn of a session is sent once the previous turn is answered.

    ``concurrency``: as in `quire_lab.bench.load`, at most this many requests at once (``held`` are those that wait);
    for a workload without arrival times, a closed loop of this many users, each of which starts its next session at the
    end of the last.
    """

    def __init__(
        self,
        workload: Workload,
        cache: CacheConfig,
        seed: int,
        *,
        chains: bool,
        concurrency: int | None = None,
    ) -> None:
        self._prompts = PromptMaker(VOCAB_SIZE, seed, FIRST_ID)
        self._chains = chains
        self._block_size = cache.block_size
        self._root = root_hash(cache.model_key, cache.block_size)
        self._later: dict[str, list[WorkloadRequest]] = defaultdict(list)  # turns to come, the next turn last
        self.first: list[WorkloadRequest] = []  # requests whose send time is known from the start
        for request in workload.requests:
            if request.turn and request.session is not None:
                self._later[request.session].append(request)
            else:
                self.first.append(request)
        for turns in self._later.values():
            turns.sort(key=lambda r: -r.turn)
        self._concurrency = concurrency
        self.held: deque[tuple[WorkloadRequest, float]] = deque()  # each with its intended send time
        self._next: deque[WorkloadRequest] = deque()  # in a closed loop: first turns that no user has reached
        if concurrency is not None and not any(request.arrival_s > 0.0 for request in workload.requests):
            self._next.extend(self.first[concurrency:])
            del self.first[concurrency:]
        self.sent: dict[str, Sent] = {}
        # Of the requests in flight: records the time of a token.
        self.marks: dict[str, Callable[[float], None]] = {}
        self.records: list[RequestRecord] = []

    @property
    def full(self) -> bool:
        """Whether ``concurrency`` requests are in flight."""
        return self._concurrency is not None and len(self.sent) >= self._concurrency

    def send(self, source: WorkloadRequest, now: float, due_s: float | None = None) -> Sent:
        """Make the request; it was due at ``due_s``, or is due now."""
        prompt = tuple(self._prompts.token_ids(source))
        sampling = SamplingParams(max_tokens=source.num_output_tokens, seed=source.index, ignore_eos=True)
        request = Request(f"r{source.index}", prompt, sampling, now)
        chain: list[bytes] = []
        if self._chains:
            extend_chain(chain, self._root, prompt, self._block_size)
        sent = Sent(source, request, now if due_s is None else due_s, now, chain)
        self.sent[request.request_id] = sent
        self.marks[request.request_id] = sent.token_times.append
        return sent

    def resumed(self, sent: Sent) -> Request:
        """Return the request for another replica after its own died: with the tokens that the client already has."""
        token_id = sampled_token(sent.request.sampling, 0)
        return replace(sent.request, output_token_ids=((token_id,) * len(sent.token_times),))

    def ended(self, event: TokenEvent, now: float) -> Iterator[tuple[WorkloadRequest, float]]:
        """Record the end of a request; yield the turn that follows and the time at which it is due."""
        sent = self.take_out(event.request_id)
        if event.timing is not None and not sent.handed_over:
            sent.num_cached_tokens = event.timing.num_cached_tokens
        failed = event.error is not None
        yield from self._note(sent, ERROR if failed else OK, now, event.error_kind, event.error)

    def left(self, request_id: str, now: float) -> Iterator[tuple[WorkloadRequest, float]]:
        """The client cancels the request, as the workload says."""
        yield from self._note(self.take_out(request_id), CANCELLED, now)

    def take_out(self, request_id: str) -> Sent:
        """Forget a request in flight, and return it."""
        del self.marks[request_id]
        return self.sent.pop(request_id)

    def _note(
        self, sent: Sent, status: str, now: float, error: str | None = None, detail: str | None = None
    ) -> Iterator[tuple[WorkloadRequest, float]]:
        times, source = sent.token_times, sent.source
        self.records.append(
            RequestRecord(
                index=source.index,
                arrival_s=sent.due_s,
                sent_s=sent.sent_s,
                end_s=now,
                num_prompt_tokens=source.num_prompt_tokens,
                num_output_tokens=len(times),
                first_token_s=times[0] if times else None,
                itl_s=tuple(map(sub, times[1:], times)),
                status=status,
                error=error,
                detail=detail,
                num_cached_tokens=sent.num_cached_tokens,
            )
        )
        turns = self._later.get(source.session or "")
        if status == ERROR and turns:
            self.records += [RequestRecord.not_sent(turn, now, error) for turn in reversed(turns)]
            turns.clear()
        if turns:
            turn = turns.pop()
            yield turn, max(turn.arrival_s, now + turn.think_s)
        elif self._next:
            yield self._next.popleft(), now
