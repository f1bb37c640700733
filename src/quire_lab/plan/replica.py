"""One replica as the planner's formulas see it, for the policies of an autoscaler (`quire_gateway.autoscale`)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.cost.cost_model import StepTime
from quire.slo import Slo
from quire_lab.plan.estimate import Load, Replica


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """A `ReplicaEstimate`: step times, the tokens that its KV cache holds, and the limits of a step."""

    steps: StepTime
    kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    slo: Slo

    def capacity(self, isl: int, osl: int) -> float:
        """Return the highest rate in requests per second that holds the SLO.

        A replica that does not hold it even alone counts with the rate that it completes.
        """
        replica, load = self._replica(isl, osl), Load(isl, osl)
        knee = replica.knee(load, self.slo)
        return knee or 1.0 / (load.osl * replica.decode_s(1, load) + replica.prefill_s(1, load))

    def concurrency(self, isl: int, osl: int, rate: float) -> float:
        """Return how many requests run at once at ``rate`` requests per second."""
        return self._replica(isl, osl).open(Load(isl, osl, rate=rate)).concurrency

    def _replica(self, isl: int, osl: int) -> Replica:
        fitting = self.kv_tokens // (isl + osl)
        return Replica(self.steps, min(self.max_num_seqs, fitting), self.max_num_batched_tokens)
