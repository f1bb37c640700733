"""The planted faults of `tools/mutants.py`. A fault is small, plausible, and wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace ``old`` by ``new`` in ``file``; one of ``tests`` (pytest arguments) must then fail."""

    name: str
    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    count: int = 1  # how often ``old`` occurs


# The first 36 seeds: every gate × order with 1, 2 and 4 steps in flight.
FUZZ = tuple(f"tests/sim/test_fuzz.py::test_fuzz[{first}]" for first in (0, 12, 24))
# Drafts and transfers, with and without chained steps.
WIDE_FUZZ = tuple(
    f"tests/sim/test_fuzz.py::test_fuzz_with_drafts_and_transfers[{first}]" for first in (0, 12)
)
EXACT = ("tests/exact/test_quick.py",)
SAMPLER = ("tests/sampling/test_sampler.py",)
VERIFY = ("tests/sampling/test_verify.py",)
SALTS = ("tests/cache/test_manager.py", "tests/cache/test_block_hash.py")
KERNELS = ("tests/kernels/test_attention.py",)
MEASURES = ("tests/bench/test_summary.py", "tests/workload")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "reference-not-released",
        "an ending sequence keeps one of its blocks",
        "src/quire/cache/manager.py",
        "self.references.give_up(table, table.block_ids())",
        "self.references.give_up(table, table.block_ids()[1:])",
        FUZZ,
    ),
    Mutant(
        "freed-while-read",
        "blocks are freed at once, though a step in flight reads them",
        "src/quire/cache/references.py",
        "        if self.in_flight(table):\n",
        "        if False:\n",
        FUZZ,
    ),
    Mutant(
        "hash-without-parent",
        "a block's hash forgets what came before it",
        "src/quire/cache/block_hash.py",
        "state.update(parent + data[start : start + width])",
        "state.update(data[start : start + width])",
        FUZZ,
    ),
    Mutant(
        "draft-behind-a-rejected-one",
        "a draft is accepted though one before it was rejected",
        "src/quire/runner/verify.py",
        "        while count < limit and token_ids[first + count] == seq.draft_ids[count]:\n            count += 1\n",
        "        count = sum(token_ids[first + i] == seq.draft_ids[i] for i in range(limit))\n",
        EXACT,
    ),
    Mutant(
        "draft-kv-not-forgotten",
        "a block keeps the draft model's K and V of what it held before",
        "src/quire/runner/draft_model.py",
        "            self.filled[block_ids] = self._written[block_ids] = 0\n",
        "            pass\n",
        EXACT,
    ),
    Mutant(
        "rejected-draft-kv-trusted",
        "the draft model takes K and V of rejected drafts for those of the tokens in their place",
        "src/quire/speculate/draft.py",
        "            if draft != token_id:\n                break\n",
        "",
        ("tests/speculate/test_draft_proposer.py",),
    ),
    Mutant(
        "salt-ignored",
        "requests of different cache salts share blocks",
        "src/quire/cache/manager.py",
        "adapter=adapter, cache_salt=cache_salt)",
        'adapter=adapter, cache_salt="")',
        SALTS,
    ),
    Mutant(
        "stale-tail-after-fork",
        "a fork gets an empty tail block instead of a copy",
        "src/quire/cache/manager.py",
        "rows.append(self.references.copy(target, shared[full_rows]))",
        "rows.append(self.references.take())",
        FUZZ,
    ),
    Mutant(
        "moves-not-made",
        "the worker does not copy the blocks that the plan moves",
        "src/quire/runner/worker.py",
        "            self.runner.kv.copy(plan.kv_moves)\n",
        "            pass\n",
        EXACT,
    ),
    Mutant(
        "full-hit-computes-nothing",
        "a prompt that is cached whole leaves its last token uncomputed",
        "src/quire/cache/prefix_cache.py",
        "min(rows * self._block_size, num_known - 1)",
        "rows * self._block_size",
        FUZZ,
    ),
    Mutant(
        "used-counts-as-idle",
        "a cached block that a sequence reads again still counts as idle",
        "src/quire/cache/references.py",
        "            self.prefix.mark_used(block_id)\n",
        "            pass\n",
        FUZZ,
    ),
    Mutant(
        "window-slides-early",
        "the cache frees a window's first block one token too early",
        "src/quire/cache/block_table.py",
        "max(0, position - w + 1) // self._block_size",
        "max(0, position - w + 2) // self._block_size",
        FUZZ,
    ),
    Mutant(
        "window-off-by-one",
        "attention sees one token more than the window",
        "src/quire/kernels/attention/__init__.py",
        "position[:, None, :] <= limit[:, :, None] - window",
        "position[:, None, :] < limit[:, :, None] - window",
        KERNELS,
    ),
    Mutant(
        "tile-by-batch",
        "the attention tile depends on the longest sequence of the batch",
        "src/quire/kernels/attention/__init__.py",
        "    blocks_per_tile = -(-TILE // kv.block_size)\n",
        "    blocks_per_tile = min(-(-TILE // kv.block_size), -(-int(batch.seq_lens.max()) // kv.block_size))\n",
        EXACT,
    ),
    Mutant(
        "old-epoch-applied",
        "the result of a sequence's life before its preemption is applied",
        "src/quire/scheduler/outcome.py",
        "        if seq.epoch != plan.epoch:  # a zombie",
        "        if seq.epoch < 0:  # a zombie",
        FUZZ,
    ),
    Mutant(
        "rejected-drafts-published",
        "a block is published up to drafts that were rejected",
        "src/quire/scheduler/outcome.py",
        "        end -= num_rejected\n",
        "",
        WIDE_FUZZ,
    ),
    Mutant(
        "rejected-drafts-keep-blocks",
        "a sequence keeps the blocks of drafts that were rejected",
        "src/quire/scheduler/state.py",
        "        self.cache.rollback(seq.table, seq.num_planned)\n",
        "",
        ("tests/sim/test_k_tokens.py",),
    ),
    Mutant(
        "load-published-whole",
        "all blocks of a load are published, though only some came",
        "src/quire/cache/transfers.py",
        "transfer.num_hit_rows + num_blocks // cache.windows.num_groups",
        "table.num_rows",
        WIDE_FUZZ,
    ),
    Mutant(
        "store-without-references",
        "the blocks of a store may be evicted while their bytes are read",
        "src/quire/cache/transfers.py",
        "            references.share(block_id)\n        references.transfers[transfer_id] = TransferBlocks(held)\n",
        "            pass\n        references.transfers[transfer_id] = TransferBlocks([])\n",
        WIDE_FUZZ,
    ),
    Mutant(
        "plain-after-preemption",
        "a preempted sequence is planned and applied as if it still had its blocks",
        "src/quire/scheduler/state.py",
        "        seq.next_event_at = 0\n        seq.forced",
        "        seq.forced",
        FUZZ,
    ),
    Mutant(
        "failed-step-stays-published",
        "the blocks of a failed step stay in the prefix tree",
        "src/quire/cache/references.py",
        "        self._prefix.withdraw(withdrawn)\n",
        "        pass\n",
        FUZZ,
    ),
    Mutant(
        "readers-not-restarted",
        "sequences that read blocks of a failed step continue with them",
        "src/quire/cache/manager.py",
        "table.reads = {n.step for n in hit.nodes if n.step > self.references.applied_step}",
        "table.reads = set()",
        FUZZ,
    ),
    Mutant(
        "cached-block-cleared",
        "the worker clears cached blocks when another sequence starts to read them",
        "src/quire/runner/input_batch.py",
        "ids[max(0, first_empty - start) :]",
        "ids",
        EXACT,
    ),
    Mutant(
        "rng-without-sample-index",
        "the random numbers do not depend on which of n sequences is sampled",
        "src/quire/sampling/sampler.py",
        "        new.sample_index,\n",
        "        0,\n",
        SAMPLER,
    ),
    Mutant(
        "rng-without-position",
        "the random numbers are the same at every position",
        "src/quire/sampling/sampler.py",
        'columns["position"] = positions + 1',
        'columns["position"] = 1',
        SAMPLER,
    ),
    Mutant(
        "penalties-lost-on-resumption",
        "a readmitted sequence has lost the counts of its penalties",
        "src/quire/sampling/processors.py",
        "        for token_id in new.output_token_ids:\n            self.advance(token_id)\n",
        "        for token_id in new.output_token_ids if self.mask else ():\n            self.mask.advance(token_id)\n",
        SAMPLER,
    ),
    Mutant(
        "wrong-draft-accepted",
        "a draft is accepted whatever was sampled in its place",
        "src/quire/runner/verify.py",
        "while count < limit and token_ids[first + count] == seq.draft_ids[count]:",
        "while count < limit:",
        VERIFY,
    ),
    Mutant(
        "drafts-share-noise",
        "all rows of a sequence that verifies drafts are sampled with the noise of its last position",
        "src/quire/runner/input_batch.py",
        "columns_of(table.columns, logits_rows, positions[indices])",
        "columns_of(table.columns, logits_rows, table.num_tokens[logits_rows] - 1)",
        ("tests/runner/test_verify.py",),
    ),
    Mutant(
        "rejected-drafts-penalised",
        "penalties go on counting drafts that were rejected",
        "src/quire/runner/sequences.py",
        "            seq.processors.rollback(num_tokens)\n",
        "            pass\n",
        VERIFY,
    ),
    Mutant(
        "coordinated-omission",
        "the benchmark's TTFT counts from when a request was sent, not from when it was due",
        "src/quire/bench/summary.py",
        "else self.first_token_s - self.arrival_s",
        "else self.first_token_s - self.sent_s",
        MEASURES,
    ),
    Mutant(
        "prompts-share-nothing",
        "prompts of equal hashes get tokens of their own",
        "src/quire/workload/request.py",
        'self._key("hash", hash_id)',
        'self._key("hash", request.index)',
        MEASURES,
    ),
    Mutant(
        "silent-refusal",
        "rows of a trace that are refused are not counted",
        "src/quire/workload/traces.py",
        "            refusals.append((number, str(reason)))",
        "            str(reason)",
        MEASURES,
    ),
    Mutant(
        "goodput-without-failures",
        "goodput counts requests that missed their SLO",
        "src/quire/workload/slo.py",
        "v <= limit for v, limit",
        "v <= 2 * limit for v, limit",
        MEASURES,
    ),
    Mutant(
        "deadline-not-kept",
        "a total deadline that has passed ends no sequence",
        "src/quire/scheduler/deadline.py",
        '        return "total"\n',
        "        return None\n",
        ("tests/scheduler/test_deadline.py",),
    ),
    Mutant(
        "thinks-one-more",
        "reasoning goes one token beyond its budget",
        "src/quire/text/constraint.py",
        "num_tokens < self._budget.num_tokens",
        "num_tokens <= self._budget.num_tokens",
        ("tests/engine/test_thinking.py::test_the_limit_is_a_function_of_the_ids",),
    ),
    Mutant(
        "answered-line-run-again",
        "a restarted server runs the lines of a batch that have an answer",
        "src/quire/jobs/runner.py",
        "                if line.custom_id in done:\n",
        "                if False:\n",
        ("tests/api/test_api_batches.py",),
    ),
    Mutant(
        "slo-forgets-the-decodes",
        "the controller sizes a chunk as if no sequence decoded beside it",
        "src/quire/scheduler/slo.py",
        "self._predictor.mixed_s(num_decodes, num) <= self._aim_s",
        "self._predictor.mixed_s(0, num) <= self._aim_s",
        ("tests/scheduler/test_slo.py",),
    ),
    Mutant(
        "slo-learns-nothing",
        "steps that take longer than the model says change nothing",
        "src/quire/scheduler/predictor.py",
        "            self._mixed_ratio.add(ratio)\n",
        "            self._mixed_ratio.add(1.0)\n",
        ("tests/scheduler/test_slo.py",),
    ),
    Mutant(
        "planner-without-windows",
        "a layer with a window keeps the whole context in the planner's memory",
        "src/quire/plan/memory.py",
        "kept = context if group.window is None else min(context, group.window)",
        "kept = context",
        ("tests/plan/test_memory.py",),
    ),
    Mutant(
        "one-all-reduce",
        "a layer reduces once, not after attention and after the MLP",
        "src/quire/plan/roofline.py",
        "seconds += 2 * work.num_layers * (e.link_s",
        "seconds += work.num_layers * (e.link_s",
        ("tests/plan/test_roofline.py",),
    ),
)
