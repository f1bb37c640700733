"""The policies of the scheduler, and when each is on. The only place that imports them.

Most follow from the settings. Some come on with the first request that needs them, and stay: a plain request meets
none. A module has a class `Rule` that is made with the `SchedulerState`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from quire.config import SchedulerConfig
from quire.request import NO_TENANT, Request

# In the order in which they are asked.
NAMES = (
    "stages",  # steps of a pipeline share decodes and prompts
    "drafts",  # speculation
    "gate",  # static or dynamic batches
    "order",  # priority, shortest-first, longest-prefix
    "fair",  # shares of tenants
    "earliest_deadline",  # the order "deadline"
    "deadlines",  # limits of requests
    "adapters",  # slots for LoRA
    "long_prompts",  # their share of a step
    "overload",  # full queues, max_ttft, deadlines that cannot be met
    "forecast",  # predicts first tokens by a model of step times
    "beams",  # beam search
    "transfers",  # blocks from or to other tiers and peers
    "tiers",  # blocks on disk
    "states",  # recurrent states and their checkpoints
    "whole_spans",  # images whose tokens see each other both ways
)
ORDERED = ("priority", "shortest-first", "longest-prefix")
# They keep books that a later change of settings goes on with.
STAY = frozenset({"fair", "long_prompts"})


def load(name: str, state: Any) -> Any:
    """Import the policy ``name`` and return one for ``state``."""
    return import_module(f"quire.scheduler.policies.{name}").Rule(state)


def modelled_predictor(config: SchedulerConfig, step_time: Any) -> Any:
    """Return a predictor that corrects a model of step times."""
    return import_module("quire.scheduler.policies.forecast").ModelledPredictor(config, step_time)


def wanted_by_config(config: SchedulerConfig, start: SchedulerConfig) -> set[str]:
    """Return the policies that settings turn on. ``start``: as the engine was built."""
    on = {
        "drafts": start.max_num_drafts > 0,
        "gate": config.gate != "continuous",
        "order": config.order in ORDERED,
        "fair": config.order == "fair",
        "earliest_deadline": config.order == "deadline",
        "adapters": config.max_loras > 0,
        "long_prompts": config.long_prefill_token_threshold > 0 and config.enable_chunked_prefill,
        "overload": config.max_ttft_s is not None,
    }
    return {name for name, is_on in on.items() if is_on}


def wanted_by_request(request: Request) -> set[str]:
    """Return the policies that ``request`` needs, beyond those of the settings."""
    on = {
        "fair": request.terms.tenant is not NO_TENANT and request.terms.tenant != NO_TENANT,
        "deadlines": request.terms.deadline is not None,
        "overload": request.terms.deadline is not None,
        "beams": request.sampling.use_beam_search,
        "whole_spans": any(span.whole for span in request.spans),
    }
    return {name for name, is_on in on.items() if is_on}
