"""Planted faults in what leaves memory and comes back: roots, transfers, and the policy of a tier."""

from __future__ import annotations

from mutant import Mutant

EXACT = "tests/exact/test_tiers.py::"
ROOTS = "tests/tiers/test_roots.py::"
STATES = "tests/scheduler/test_tier_states.py::"
POLICY = "tests/scheduler/test_tiers.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "lost-blocks-published",
        "all blocks of a load are published, those that did not come whole as well",
        "src/quire/cache/transfers.py",
        "            num_rows += num_blocks // num_groups\n",
        "            num_rows = table.num_rows\n",
        (f"{EXACT}test_blocks_of_a_tier_are_the_same_bits[llama-float32-reference-seed61-0.1]",),
    ),
    Mutant(
        "load-without-its-state",
        "a prompt goes on from a state that did not come whole",
        "src/quire/cache/transfers.py",
        "is_whole = num_blocks > (table.num_rows - num_rows) * num_groups  # with its state\n",
        "is_whole = num_blocks > 0\n",
        (f"{STATES}test_a_load_without_its_state_brings_nothing",),
    ),
    Mutant(
        "state-of-another-place-loaded",
        "a prompt goes on from the state of a place behind its tokens",
        "src/quire/cache/carried_states.py",
        "        return group_block_hash(block_hash, self._cache.windows.num_groups)\n",
        "        return group_block_hash(bytes(32), self._cache.windows.num_groups)\n",
        (f"{EXACT}test_blocks_of_a_tier_are_the_same_bits[hybrid-float32-reference-seed70-0.0]",),
    ),
    Mutant(
        "state-overwritten-while-stored",
        "a sequence gets the slot of a state that a store reads",
        "src/quire/cache/states.py",
        "        if self.carried is not None and slot in self._held:\n",
        "        if False:\n",
        (f"{STATES}test_a_state_that_is_stored_keeps_its_slot",),
    ),
    Mutant(
        "root-without-content",
        "another model of the same shape finds the blocks of the first one",
        "src/quire/engine/kv_root.py",
        '"quire.kv.v1", ARITHMETIC, content,',
        '"quire.kv.v1", ARITHMETIC, "",',
        (f"{ROOTS}test_what_changes_no_bits_does_not_change_the_root",),
    ),
    Mutant(
        "root-without-level",
        "blocks of one level of the kernels are read by another",
        "src/quire/engine/kv_root.py",
        "runner.backend, runner.kernels,",
        "runner.backend,",
        (f"{ROOTS}test_what_changes_bits_changes_the_root[level]",),
    ),
    Mutant(
        "digest-by-time-alone",
        "a file that changed, with its old time set again, has the digest that was kept",
        "src/quire/models/content.py",
        "stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]",
        "stat.st_size, stat.st_mtime_ns]",
        (f"{ROOTS}test_each_byte_of_each_file_counts[0]",),
    ),
    Mutant(
        "transfer-of-a-failed-step",
        "a load goes on into blocks that the scheduler gave to others when its step failed",
        "src/quire/executor/moving.py",
        "        if result.error is not None:\n            self._cancel(plan)\n",
        "",
        (f"{EXACT}test_steps_that_fail_take_their_transfers_along",),
    ),
    Mutant(
        "slow-load-awaited",
        "a request waits for a load however long it takes",
        "src/quire/scheduler/policies/tiers.py",
        "if not load.is_late and now >= load.limit_s:",
        "if False:",
        (f"{POLICY}test_a_load_that_does_not_end_is_given_up",),
    ),
    Mutant(
        "losing-tier-asked",
        "blocks are loaded though computing them is quicker",
        "src/quire/scheduler/policies/tiers.py",
        "if 0.0 < compute_s <= load_s:",
        "if False:",
        (f"{POLICY}test_a_tier_that_loses_is_not_asked_but_for_a_try",),
    ),
    Mutant(
        "golden-prompt-from-the-disk",
        "the golden prompt's blocks come from a life of the server before this one",
        "src/quire/scheduler/policies/tiers.py",
        "    return seq.group.request.terms.cache_salt == seq.request_id\n",
        "    return False\n",
        (f"{POLICY}test_a_prompt_that_is_to_be_computed_is_neither_stored_nor_loaded",),
    ),
)
