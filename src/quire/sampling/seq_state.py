"""`SeqState`: what an optional feature keeps of one sequence at its worker; and the one list of these features.

A plain sequence has no state, and loads none of these modules: its token is sampled from its row of logits as it is.

    prompt       log-probabilities or a pooled vector of its prompt's own tokens
    processors   logit_bias, penalties, forbidden ids, typical_p
    grammar      what structured_outputs allows
    drafting     drafts that it verifies; begins with the first of them (`WorkerSeqs.drafting`)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from quire.sampling.draft_tree import Drafts
from quire.step import NewSeq


class SeqState(Protocol):
    """The base class of states, in which each method does nothing.

    A state is a function of (prompt ids, output ids). It begins at each admission (`begin` of its module), so that a
    sequence which was preempted, restarted or forked continues as if nothing had happened.
    """

    # Why the sequence cannot go on, and whether the fault may be another sequence's.
    error: str | None = None
    is_bystander: bool = False

    def apply(self, rows: Tensor, drafts: Drafts) -> Collection[int]:
        """Change rows of logits before anything looks at them; return the drafts that may not be accepted.

        ``rows [1 + len(drafts), vocab_size]``: the next token's, and that behind each draft.
        """
        return ()

    def advance(self, token_id: int) -> object:
        """Take the next output token."""
        return None

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` output tokens, which were drafts."""
        return

    def accept(self, path: Sequence[int]) -> None:
        """Of the drafts of the last `apply`, those on ``path`` from the root are output tokens now."""
        return

    def end(self) -> None:
        """The sequence goes, or is admitted anew."""
        return


class Means(NamedTuple):
    """What a worker gives to the states of its sequences."""

    vocab_size: int
    grammars: Callable[[], Any]  # returns `Grammars`; called with the first
    lora: Any  # `LoraSlots`; None: there are no adapters
    samples: bool  # whether this rank samples; else it is told the tokens


# In the order in which they begin and change rows. A module has `begin(new, means)`; None: there is nothing to keep.
STATES = {
    "prompt": "quire.runner.prompt_outputs",
    "processors": "quire.sampling.processors",
    "grammar": "quire.sampling.grammars",
}


def wanted(new: NewSeq, *, samples: bool) -> list[str]:
    """Return which of `STATES` a sequence has."""
    on = {
        "prompt": new.pooling is not None or new.prompt_logprobs is not None,
        "processors": samples and new.edits_logits,
        "grammar": samples and new.grammar is not None,
    }
    return [name for name in STATES if on[name]]


class Begun(NamedTuple):
    """The states of a sequence by name, or why it cannot run (``refusal``) or be sampled (``failure``)."""

    states: dict[str, SeqState]
    refusal: str | None = None
    failure: str | None = None


def begin(new: NewSeq, means: Means) -> Begun:
    """Begin the states that ``new`` wants. Whatever goes wrong in one, the other sequences of the step go on."""
    states: dict[str, SeqState] = {}
    if new.adapter_slot:
        if means.lora is None:
            return Begun({}, f"adapter slot {new.adapter_slot} is asked for; this worker runs no adapters.")
        refusal = means.lora.failure(new.adapter_slot)
        if refusal is not None:
            return Begun({}, refusal)
    for name in wanted(new, samples=means.samples):
        try:
            state = import_module(STATES[name]).begin(new, means)
        except Exception as error:
            text = f"its sampling cannot be set up: {type(error).__name__}: {error}"
            return Begun(states, failure=text)
        if state is not None:
            states[name] = state
    return Begun(states)
