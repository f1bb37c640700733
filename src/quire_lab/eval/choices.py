"""Choice tasks by log-likelihood, as lm-eval counts them.

acc        the right choice has the largest sum of log-probabilities of its tokens
acc_norm   the largest of that sum divided by the choice's length in characters
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.text.tokenizer import Tokenizer
from quire_lab.eval.figures import mean_and_error
from quire_lab.eval.inputs import ChoiceTask
from quire_lab.eval.windows import Window


@dataclass(frozen=True, slots=True)
class EncodedTask:
    """A task as a window for each choice, whose scored tokens are the choice's."""

    gold: int
    windows: tuple[Window, ...]
    lengths: tuple[int, ...]  # characters of each choice


def encode_task(tokenizer: Tokenizer, task: ChoiceTask, max_len: int) -> EncodedTask:
    """Return the windows of a task; a context that is too long loses its beginning.

    Raises:
        ConfigError: a choice alone is longer than the model's context, or there is no token to begin with.
    """
    windows = []
    for number, choice in enumerate(task.choices):
        context, ids = encode_pair(tokenizer, task.context, choice)
        num_scored = len(ids) - len(context)
        if not context:
            raise ConfigError(
                f"{task.where}: context is empty, and the model has no token that begins a text"
            )
        if not 0 < num_scored < max_len:
            raise ConfigError(
                f"{task.where}: choice {number} has {num_scored} tokens; 1…{max_len - 1} are possible with a context "
                f"of {max_len}"
            )
        window = ids[-max_len:]
        windows.append(Window(tuple(window), len(window) - num_scored))
    return EncodedTask(task.gold, tuple(windows), tuple(map(len, task.choices)))


def encode_pair(tokenizer: Tokenizer, context: str, choice: str) -> tuple[list[int], list[int]]:
    """Return the ids of the context, and of context and choice together.

    One space stands between the two, unless there is white space already. The context's own white space at its end
    belongs to the choice, since tokens of many vocabularies begin with a space.
    """
    stem = context.rstrip()
    between = context[len(stem) :] or ("" if not stem or choice[:1].isspace() else " ")
    begin = tokenizer.encode(stem) if stem else beginning(tokenizer)
    if not stem:
        return begin, begin + tokenizer.encode(between + choice, add_special_tokens=False)
    return begin, tokenizer.encode(stem + between + choice)


def beginning(tokenizer: Tokenizer) -> list[int]:
    """Return the token that stands before a text with no context: the one that begins texts, or one that ends them."""
    if tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]
    return list(tokenizer.eos_token_ids[:1])


class Answers:
    """Which tasks a model answered rightly."""

    def __init__(self) -> None:
        self._right: list[tuple[bool, bool]] = []

    def add(self, task: EncodedTask, log_likelihoods: Sequence[float]) -> None:
        """Add a task, with the sum of log-probabilities of each choice."""
        scores = np.array(log_likelihoods)
        normed = scores / np.array(task.lengths)
        self._right.append((int(scores.argmax()) == task.gold, int(normed.argmax()) == task.gold))

    def summary(self, suffix: str = "") -> dict[str, Any]:
        """Return accuracies with their standard errors; None without a task."""
        columns = np.array(self._right, np.float64).reshape(-1, 2).T
        accuracies = {}
        for name, column in zip(("acc", "acc_norm"), columns, strict=True):
            accuracies[f"{name}{suffix}"], accuracies[f"{name}{suffix}_se"] = mean_and_error(column)
        return accuracies
