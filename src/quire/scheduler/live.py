"""`LiveLog`: what a page that watches the engine draws, read from the scheduler between two steps.

It exists only while a reader asks: the core makes one at the first `TakeLive` and drops it `IDLE_S` after the last.
Until then a step costs one entry of a deque; everything else is computed when a reader asks, and the reply says how
long that took (``cost_s``), so that the reader can ask less often.

A reply's lists are columns of fixed meaning, to keep the message small:

    seqs    [seq_id, request_id, sample_index, state, prompt tokens, of these cached, planned, output tokens, blocks,
             preemptions, adapter]                      every sequence that has not ended
    new     [seq_id, epoch, prompt tokens, start_s]    admissions since the last reply, of ended sequences too
    chunks  [seq_id, start_s, end_s, tokens]           prompt chunks since the last reply
    decodes [seq_id, start_s, end_s, tokens, drafts, accepted drafts]   per sequence, since the last reply
    steps   {count, tokens, prompt_tokens, seqs, plan_s, compute_s, draft_s, apply_s}: sums since the last reply; and of
            admitted prompts, {new_tokens, shared_tokens}: in all, and those that began a prompt seen before
    blocks  a byte per cell of ``blocks_per_cell`` blocks, as far as blocks were ever used: `FREE`, `CACHED`, `SHARED`,
            or `OWNED` + seq_id mod 250
    tree    [node, parent node, first row, rows, sequences that hold it, hits]   runs of the prefix tree
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from quire.cache.blocks import NO_BLOCK, Node
from quire.clock import Clock
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.settings import long_threshold
from quire.scheduler.state import SchedulerState
from quire.step import StepPlan, StepResult

IDLE_S = 5.0
FREE, CACHED, SHARED, OWNED = 0, 1, 2, 3
_COLOURS = 250
_MAX_SHOWN = 4096  # cells, steps and chunks of a reply
_MAX_RUNS = 160  # runs in a drawn tree
_MAX_NODES = 20_000  # a larger tree is not drawn
_MAX_STARTS = 65_536
_TREE_EVERY = 4  # replies


class _Step(NamedTuple):
    plan: StepPlan
    result: StepResult
    planned_s: float
    start_s: float
    end_s: float
    applied_s: float


class LiveLog:
    """The steps since the last reading of one engine."""

    def __init__(self, now_s: float) -> None:
        self._read_s = now_s
        self._began = (now_s, now_s)
        self._steps: deque[_Step] = deque(maxlen=_MAX_SHOWN)
        self._num_reads = 0
        self._hits: Counter[bytes] = Counter()  # per last block that an admission found in the tree
        self._starts: set[int] = set()  # hashes of the beginnings of prompts, block by block
        self._prompts: dict[int, int] = {}  # per sequence: tokens that are no decode

    def is_idle(self, now_s: float) -> bool:
        """Whether no reader has asked for `IDLE_S`."""
        return now_s - self._read_s > IDLE_S

    def begin(self, scheduler: Scheduler, plan: StepPlan | StepResult, now_s: float) -> None:
        """Note that the loop waits for ``plan``, the oldest step in flight, from now on."""
        record = scheduler.state.in_flight[0]
        self._began = (record.planned_s, now_s)
        if isinstance(plan, StepPlan) and plan.new_seqs:
            admitted = {new.seq_id for new in plan.new_seqs if not new.epoch}
            for seq in record.sequences:
                row = seq.group.num_cached_tokens // seq.table.block_size - 1
                if seq.seq_id in admitted and 0 <= row < len(seq.table.chain):
                    self._hits[seq.table.chain[row]] += 1

    def note(self, plan: StepPlan, result: StepResult, end_s: float, applied_s: float) -> None:
        """Note this step, which has been applied: its result came at ``end_s``."""
        self._steps.append(_Step(plan, result, *self._began, end_s, applied_s))

    def read(self, scheduler: Scheduler, clock: Clock) -> dict[str, Any]:
        """Return the state as of now and what happened since the last call."""
        state, now_s = scheduler.state, clock.now()
        activity = self._activity(scheduler.cache.block_size)
        values: dict[str, Any] = {"t": now_s, "since": self._read_s, **activity}
        values["seqs"] = list(self._sequences(state))
        values["blocks"], values["blocks_per_cell"] = _cells(scheduler, state)
        if self._num_reads % _TREE_EVERY == 0:
            values["tree"] = _runs(scheduler, self._hits)
        stats = scheduler.stats()
        values["gauges"] = {
            name: getattr(stats, name)
            for name in (
                "num_running", "num_waiting", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_idle_blocks",
                "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_preemptions", "num_refused",
                "num_finished", "num_failed", "num_draft_tokens", "num_accepted_tokens", "accepted_at", "draft_gain",
                "num_evicted_blocks", "num_loaded_blocks", "num_stored_blocks",
            )
        }  # fmt: skip
        config = state.config
        values["limits"] = {
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "long_prefill_token_threshold": long_threshold(config),
            "block_size": scheduler.cache.block_size,
            "order": config.order,
            "gate": config.gate,
        }
        self._read_s, self._num_reads = now_s, self._num_reads + 1
        values["cost_s"] = clock.now() - now_s
        return values

    def _shared(self, prompt: tuple[int, ...], adapter: int, block_size: int) -> int:
        """Return how many of the prompt's tokens, in whole blocks, began another prompt that was noted; note it."""
        chain, num_shared = hash(adapter), 0
        if len(self._starts) > _MAX_STARTS:
            self._starts.clear()
        for start in range(0, len(prompt) - block_size, block_size):
            chain = hash((chain, prompt[start : start + block_size]))
            num_shared += block_size if chain in self._starts else 0
            self._starts.add(chain)
        return num_shared

    def _activity(self, block_size: int) -> dict[str, Any]:
        """Sum up the noted steps, and forget them."""
        new: list[tuple[int, int, int, float]] = []
        chunks: list[tuple[int, float, float, int]] = []
        decodes: dict[int, list[float]] = {}
        sums = dict.fromkeys(("count", "tokens", "prompt_tokens", "seqs", "new_tokens", "shared_tokens"), 0)
        spent = dict.fromkeys(("plan_s", "compute_s", "draft_s", "apply_s"), 0.0)
        prompts, steps = self._prompts, list(self._steps)
        self._steps.clear()
        before_s = steps[0].planned_s if steps else 0.0
        for step in steps:
            for gone in step.plan.gone:
                prompts.pop(gone, None)
            for new_seq in step.plan.new_seqs:
                num_known = len(new_seq.prompt_token_ids) + len(new_seq.output_token_ids)
                new.append((new_seq.seq_id, new_seq.epoch, len(new_seq.prompt_token_ids), step.planned_s))
                prompts[new_seq.seq_id] = num_known
                if not new_seq.epoch:
                    prompt = new_seq.prompt_token_ids
                    sums["new_tokens"] += len(prompt)
                    sums["shared_tokens"] += self._shared(prompt, new_seq.adapter_slot, block_size)
            sums["count"] += 1
            sums["seqs"] += len(step.plan.seqs)
            for plan, result in zip(step.plan.seqs, step.result.seqs, strict=False):
                num = plan.num_scheduled_tokens
                sums["tokens"] += num
                if plan.num_known_tokens > 1 or plan.num_computed_tokens < prompts.get(plan.seq_id, 0):
                    sums["prompt_tokens"] += num
                    chunks.append((plan.seq_id, step.start_s, step.end_s, num))
                    continue
                made = len(result.token_ids)
                accepted = max(0, made - 1) if plan.num_draft_tokens else 0
                decode = decodes.get(plan.seq_id)
                if decode is None:
                    drafts = plan.num_draft_tokens
                    decodes[plan.seq_id] = [step.start_s, step.end_s, made, drafts, accepted]
                else:
                    decode[1] = step.end_s
                    decode[2] += made
                    decode[3] += plan.num_draft_tokens
                    decode[4] += accepted
            # A step that waited for a request begins when it is planned; else behind the one before.
            spent["plan_s"] += max(0.0, step.start_s - max(step.planned_s, before_s))
            spent["draft_s"] += step.result.draft_s
            spent["compute_s"] += max(0.0, step.end_s - step.start_s - step.result.draft_s)
            spent["apply_s"] += step.applied_s - step.end_s
            before_s = step.applied_s
        return {
            "steps": sums | spent,
            "new": new[-_MAX_SHOWN:],
            "chunks": chunks[-_MAX_SHOWN:],
            "decodes": [(seq_id, *decode) for seq_id, decode in decodes.items()],
        }

    def _sequences(self, state: SchedulerState) -> Iterator[tuple[object, ...]]:
        for seq in state.sequences.values():
            group, table = seq.group, seq.table
            adapter = group.request.adapter
            yield (
                seq.seq_id, seq.request_id, seq.sample_index, seq.state.value, seq.num_prompt,
                group.num_cached_tokens, seq.num_planned, len(seq.token_ids) - seq.num_prompt, table.num_rows,
                seq.num_preemptions, "" if adapter is None else adapter.name,
            )  # fmt: skip


def _cells(scheduler: Scheduler, state: SchedulerState) -> tuple[bytes, int]:
    """Return a byte per cell of the blocks that were ever used, and the blocks of a cell; its last block colours it."""
    pool = scheduler.cache.pool
    num_touched = pool.num_blocks - pool.num_untouched
    per_cell = max(1, -(-num_touched // _MAX_SHOWN))
    cells = bytearray(-(-num_touched // per_cell))
    counts = pool.ref_counts
    for block_id in range(num_touched):
        if counts[block_id]:
            cells[block_id // per_cell] = CACHED
    is_held = bytearray(num_touched)
    for seq in state.running:
        colour = OWNED + seq.seq_id % _COLOURS
        for rows in seq.table.rows:
            for block_id in rows:
                if block_id != NO_BLOCK:
                    cells[block_id // per_cell] = SHARED if is_held[block_id] else colour
                    is_held[block_id] = 1
    return bytes(cells), per_cell


def _runs(scheduler: Scheduler, hits: Counter[bytes]) -> list[tuple[int, int, int, int, int, int]]:
    """Return the prefix tree with nodes that have one child joined to runs, the most used ones; parents first."""
    nodes = scheduler.cache.prefix.nodes
    if len(nodes) > _MAX_NODES:
        return []
    ids = {block_hash: i for i, block_hash in enumerate(nodes)}
    ends = [node for node in nodes.values() if not _has_one_child(node) or node.block_hash in hits]
    is_end = {node.block_hash for node in ends}
    runs = []
    for node in ends:
        length, above = 1, node.parent
        while above is not None and above.block_hash not in is_end:
            length, above = length + 1, above.parent
        runs.append((node, above, length))
    total: Counter[bytes] = Counter(hits)
    rows: dict[bytes, int] = {}

    def end_row(node: Node | None) -> int:
        count, walked = 0, node
        while walked is not None and walked.block_hash not in rows:
            count, walked = count + 1, walked.parent
        known = rows[walked.block_hash] if walked is not None else 0
        if node is not None:
            rows[node.block_hash] = known + count
        return known + count

    for node, above, _ in sorted(runs, key=lambda run: -end_row(run[0])):
        if above is not None:
            total[above.block_hash] += total[node.block_hash]
    ranked = sorted(runs, key=lambda run: (-total[run[0].block_hash], end_row(run[0])))
    shown = {run[0].block_hash for run in ranked[:_MAX_RUNS]}
    return [
        (
            ids[node.block_hash], -1 if above is None else ids[above.block_hash], end_row(node) - length, length,
            node.num_used, total[node.block_hash],
        )
        for node, above, length in sorted(ranked, key=lambda run: end_row(run[0]))
        if node.block_hash in shown and (above is None or above.block_hash in shown)
    ]  # fmt: skip


def _has_one_child(node: Node) -> bool:
    return node.first_child is not None and node.first_child.next_sibling is None
