"""Planted faults in who waits in the scheduler: order, round robin, fair shares, long prompts, and who pays."""

from __future__ import annotations

from mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "turn-forgotten",
        "round robin of decodes forgets whose turn it is",
        "src/quire/scheduler/planner.py",
        "seq.turn = self._state.next_turn\n",
        "seq.turn = 0\n",
        ("tests/scheduler/test_turns.py::test_decodes_that_do_not_fit_take_turns",),
    ),
    Mutant(
        "stages-with-a-whole-last-mlp",
        "pipeline stages are balanced with a whole last MLP, which prompts do not compute",
        "src/quire/parallel/shard.py",
        "chosen * (1 - PROMPTS if is_last_mlp else 1.0)",
        "chosen",
        ("tests/parallel/test_shard.py::test_the_last_mlp_counts_as_decoding_alone",),
    ),
    Mutant(
        "preempted-goes-last",
        "a preempted sequence waits behind all that arrived meanwhile",
        "src/quire/scheduler/state.py",
        "        seq.key = sort_key(self.config.order, seq)\n        self.waiting.add(seq)",
        "        seq.key = sort_key(self.config.order, seq)\n"
        "        seq.key = (seq.key[0] + 1e6 * seq.num_preemptions, *seq.key[1:])\n        self.waiting.add(seq)",
        ("tests/scheduler/test_turns.py::test_a_preempted_sequence_is_before_later_arrivals",),
    ),
    Mutant(
        "fair-prompt-free",
        "prompts are not charged to their tenants",
        "src/quire/scheduler/queue.py",
        "            self._charge(seq, PREFILL * num_tokens)",
        "            self._charge(seq, 0.0 * num_tokens)",
        ("tests/scheduler/test_turns.py::test_a_prompt_is_charged_once_to_its_tenant",),
    ),
    Mutant(
        "priority-never-ages",
        "waiting does not make up for priority",
        "src/quire/scheduler/queue.py",
        "AGING_S = 30.0",
        "AGING_S = 3e9",
        ("tests/scheduler/test_order.py::test_low_priority_does_not_starve",),
    ),
    Mutant(
        "deadline-by-its-last-limit",
        "the order deadline ranks by the later of two limits",
        "src/quire/scheduler/queue.py",
        "return request.arrival_s + min((limit",
        "return request.arrival_s + max((limit",
        ("tests/scheduler/test_turns.py::test_the_first_of_two_limits_ranks_a_deadline",),
    ),
    Mutant(
        "queue-of-one-more",
        "the queue takes one more than its bound",
        "src/quire/scheduler/overload.py",
        "    if num_waiting + held >= most:",
        "    if num_waiting + held > most:",
        ("tests/scheduler/test_turns.py::test_the_queue_holds_as_many_as_its_bound",),
    ),
    Mutant(
        "long-share-inverted",
        "short prompts have the sixteenth and the long one the rest",
        "src/quire/scheduler/long_prompts.py",
        "return self._budget.long_room if self.is_long(seq, num_left) else self._budget.short_room",
        "return self._budget.short_room if self.is_long(seq, num_left) else self._budget.long_room",
        (
            "tests/scheduler/test_long_prompts.py::test_a_short_prompt_is_computed_in_the_next_step",
            "tests/scheduler/test_long_prompts.py::test_a_long_prompt_alone_has_its_threshold_per_step",
        ),
    ),
    Mutant(
        "long-one-starves",
        "short prompts leave a running long one no tokens",
        "src/quire/scheduler/budget.py",
        "            self._long = max(least, min(num_short, self.left) // LONG_SHARE)",
        "            self._long = 0",
        ("tests/scheduler/test_long_prompts.py::test_a_short_prompt_is_computed_in_the_next_step",),
    ),
    Mutant(
        "long-blocks-given-away",
        "short prompts take the blocks that a long one needs yet",
        "src/quire/scheduler/planner.py",
        "adapters, num_held = AdapterGate(state.adapters), self._long.held_blocks(prefills)",
        "adapters, num_held = AdapterGate(state.adapters), 0",
        ("tests/scheduler/test_long_prompts.py::test_blocks_of_a_running_prompt_are_not_given_away",),
    ),
    Mutant(
        "fair-prompt-twice",
        "a preempted prompt is charged to its tenant again",
        "src/quire/scheduler/queue.py",
        "        if not seq.num_preemptions:\n            self._charge(seq, PREFILL",
        "        if True:\n            self._charge(seq, PREFILL",
        ("tests/scheduler/test_turns.py::test_a_prompt_is_charged_once_to_its_tenant",),
    ),
    Mutant(
        "step-charged-per-sequence",
        "a prompt of a step pays as much as a decode",
        "src/quire/scheduler/outcome.py",
        "            seq.engine_s += token_s * plan.num_scheduled_tokens",
        "            seq.engine_s += token_s",
        ("tests/scheduler/test_costs.py::test_step_is_shared_by_scheduled_tokens",),
    ),
    Mutant(
        "step-charged-to-the-dead",
        "the share of a sequence that ended in flight is lost from the books",
        "src/quire/scheduler/costs.py",
        "        state.counters.unshared_s += spent_s\n    else:",
        "        pass\n    else:",
        ("tests/scheduler/test_costs.py::test_a_sequence_that_ended_in_flight_is_charged_nothing",),
    ),
)
