"""Planted faults in recurrent states: whose slot is whose, and what a checkpoint is of."""

from __future__ import annotations

from mutant import Mutant

SLOTS = "src/quire/cache/states.py"
DRAFTS = "src/quire/cache/draft_slots.py"
CACHE = ("tests/cache/test_states.py",)
GOES_BACK = "tests/exact/test_quick.py::test_quick_with_states_that_go_back"
FUZZ = tuple(f"tests/sim/test_fuzz.py::test_fuzz_with_recurrent_states[{first}]" for first in (0, 12, 24))

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "checkpoint-one-block-early",
        "a checkpoint is kept for the block behind its own, so that a hit skips a block",
        SLOTS,
        "block_hash = table.chain[place.num_tokens // size - 1 : place.num_tokens // size]",
        "block_hash = table.chain[place.num_tokens // size : place.num_tokens // size + 1]",
        CACHE,
    ),
    Mutant(
        "checkpoint-after-the-wrong-token",
        "checkpoints are saved one token too early",
        SLOTS,
        "sorted((save.place.num_tokens - start, save.slot)",
        "sorted((save.place.num_tokens - start - (save.place.num_tokens - start > 1), save.slot)",
        CACHE,
    ),
    Mutant(
        "state-slot-free-while-written",
        "the slot of a sequence that stops is free at once, though a step in flight writes it",
        SLOTS,
        "        if self._references.in_flight(table):\n",
        "        if False:\n",
        FUZZ,
    ),
    Mutant(
        "checkpoint-of-a-failed-sequence",
        "what a sequence that failed has saved is kept",
        SLOTS,
        "save.is_valid = save.is_valid and save.table not in wrong",
        "pass",
        CACHE,
    ),
    Mutant(
        "fork-without-the-state",
        "a fork begins with whatever its slot holds",
        SLOTS,
        "        self._move(target, slot, self._begin(target, num_tokens + 1).slot)\n",
        "        self._begin(target, num_tokens + 1)\n",
        CACHE,
    ),
    Mutant(
        "answer-outlives-its-turn",
        "the end of an earlier turn is kept like that of the last one",
        SLOTS,
        "            if save.place.kind in LAST_KINDS:\n                self._supersede(save.live)\n",
        "",
        CACHE,
    ),
    Mutant(
        "rejected-draft-stays-in-the-state",
        "after rejected drafts the state goes on from one draft too early",
        DRAFTS,
        "self._behind[table] = slots.pop(count)",
        "self._behind[table] = slots.pop(max(0, count - 1))",
        (*FUZZ, GOES_BACK),
    ),
    Mutant(
        "state-never-goes-back",
        "the state keeps the drafts that were rejected",
        SLOTS,
        "            self._move(table, slot, self.live[table].slot)\n        if not num_drafts:",
        "            pass\n        if not num_drafts:",
        (*FUZZ, GOES_BACK),
    ),
    Mutant(
        "checkpoints-keep-the-one-before",
        "a checkpoint that is saved before another on its path leaves that one's worth as it was",
        "src/quire/cache/checkpoints.py",
        "                later.previous = checkpoint\n",
        "                pass\n",
        ("tests/cache/test_states.py::test_worth_of_checkpoints_is_that_of_any_order",),
    ),
    Mutant(
        "mtp-reads-before-its-norm",
        "a draft behind a draft of Qwen's MTP layer reads the hidden state from before the layer's last norm",
        "src/quire/models/draft_head.py",
        "(last if self.spec.feeds_norm else output), logits",
        "output, logits",
        ("tests/speculate/test_qwen_mtp.py::test_drafts_of_qwens_mtp_are_those_of_its_equations[qwen3_5]",),
    ),
    Mutant(
        "scan-begins-with-what-lay-there",
        "a sequence that begins reads the state that another left in its slot",
        "src/quire/kernels/recurrent/__init__.py",
        "state = torch.zeros_like(view.state[slot]) if fresh else view.state[slot].clone()",
        "state = view.state[slot].clone()",
        ("tests/kernels/test_recurrent.py", "tests/exact/test_quick.py::test_quick"),
    ),
    Mutant(
        "one-decay-for-all-channels",
        "every channel of the key decays as the first one does",
        "src/quire/kernels/recurrent/channel_delta.py",
        "            state = state * decays\n",
        "            state = state * decays[:, :1]\n",
        ("tests/kernels/test_channel_delta.py",),
    ),
    Mutant(
        "past-of-the-chunk-before",
        "the convolution keeps the rows before its chunk, not the last ones of it",
        "src/quire/kernels/recurrent/__init__.py",
        "view.past[target] = rows[count : count + kernel - 1]",
        "view.past[target] = rows[: kernel - 1]",
        ("tests/kernels/test_recurrent.py",),
    ),
    Mutant(
        "mamba-checkpoint-one-token-late",
        "a checkpoint of Mamba-2's state is that of one token later",
        "src/quire/kernels/recurrent/mamba.py",
        "for _, target in [entry for entry in targets if entry[0] == token + 1 - begin]:",
        "for _, target in [entry for entry in targets if min(entry[0] + 1, end - begin) == token + 1 - begin]:",
        ("tests/kernels/test_mamba.py",),
    ),
    Mutant(
        "parallel-mixers-share-a-state",
        "layers that attend and keep a state all read and write the state of the first of them",
        "src/quire/layers/sources.py",
        "views[of_state]) for of_cache, of_state in self.of_views",
        "views[self.of_views[0][1]]) for of_cache, _ in self.of_views",
        ("tests/parity/test_family_parity.py::test_family[falcon_h1]",),
    ),
    Mutant(
        "tier-that-hangs-has-the-last-slot",
        "a request of a hybrid model waits for a bad disk, which has all slots of states",
        "src/quire/cache/carried_states.py",
        "return len(self.loading) + len(self.stored_slots) >= self._slots.config.num_checkpoints",
        "return False",
        ("tests/scheduler/test_tier_states.py",),
    ),
)
