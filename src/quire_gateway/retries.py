"""`RetryBudget`: retries are a share of the traffic, so that they cannot multiply an overload."""

from __future__ import annotations

from quire_gateway.attempts import Attempts
from quire_gateway.config import RetryArgs


class RetryBudget:
    """Each request earns ``share`` of a retry, up to ``reserve``, which is also what the budget begins with."""

    def __init__(self, share: float, reserve: int) -> None:
        self._share = share
        self._reserve = float(reserve)
        self.balance = float(reserve)
        self.num_taken = 0
        self.num_refused = 0

    def earn(self) -> None:
        """A request arrived."""
        self.balance = min(self.balance + self._share, self._reserve)

    def take(self) -> bool:
        """Whether one more retry may be made now."""
        if self.balance < 1.0:
            self.num_refused += 1
            return False
        self.balance -= 1.0
        self.num_taken += 1
        return True


def pays(attempts: Attempts, model: str, args: RetryArgs, budget: RetryBudget) -> bool:
    """Whether a request whose attempt at ``model`` failed may have another one there; it is paid for then."""
    if attempts.failures[model] < args.attempts and budget.take():
        attempts.owed.discard(model)
        return True
    attempts.closed.add(model)
    return False
