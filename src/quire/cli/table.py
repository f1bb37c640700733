"""What `quire` runs from the gateway's tree and the lab's: a name → "module:function", imported when it is used.

A server and `quire.LLM` load neither. A tree is also run from a path, without entry points of a distribution.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

TABLE = {
    # Commands of `quire`; an app is a group of commands.
    "autoscale": "quire_lab.cli.autoscale:autoscale",
    "bench": "quire_lab.cli.measure:bench_app",
    "cockpit": "quire_lab.cli.cockpit:cockpit",
    "diagnose": "quire_lab.cli.diagnose:run",
    "eval": "quire_lab.cli.measure:eval_app",
    "gateway": "quire_gateway.cli.gateway:gateway",
    "keys": "quire.cli.keys:keys_app",
    "kv": "quire.cli.kv:kv_app",
    "learn": "quire_lab.cli.learn:learn",
    "ledger": "quire_gateway.cli.ledger:ledger_app",
    "plan": "quire_lab.cli.plan:plan",
    "quantize": "quire_lab.cli.quantize:quantize_app",
    "profile": "quire_lab.cli.measure:profile_app",
    "simulate": "quire_lab.cli.measure:simulate_app",
    # Parts of other commands.
    "doctor --server": "quire_lab.cli.doctor_server:server",
    "serve --check": "quire_lab.eval.check:check",
    "serve --cockpit": "quire_lab.cli.cockpit:start_page",
    "serve --compare-to": "quire_lab.bench.compare:compare_to",
    "serve --replicas": "quire_gateway.cli.replicas:serve_replicas",
    "serve MODEL MODEL": "quire_gateway.cli.serve_models:serve_models",
}


def from_table(name: str) -> Any:
    """Return the function or app that ``name`` stands for."""
    module, _, attribute = TABLE[name].partition(":")
    return getattr(import_module(module), attribute)
