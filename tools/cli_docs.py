"""Write docs/cli.md from the flags, so that it cannot disagree with --help (tests/cli checks).

python tools/cli_docs.py > docs/cli.md
"""

from __future__ import annotations

from typing import Any

from quire.args import EngineArgs, ServerArgs, Setting, defaults, flag_name, settings_of
from quire.cli.flags import AutoscaleArgs, PlanArgs, ReplayArgs
from quire_gateway.auto_config import AutoArgs, RuleArgs
from quire_gateway.config import (
    BackendArgs,
    DisaggregationArgs,
    GatewayArgs,
    HealthArgs,
    HedgeArgs,
    ModelArgs,
    RetryArgs,
    RoutingArgs,
    TimeoutArgs,
)
from quire_gateway.filter_config import FilterArgs
from quire_gateway.region_config import RegionArgs
from quire_lab.bench.args import (
    LatencyArgs,
    ProfileArgs,
    ServeBenchArgs,
    SimulateArgs,
    SpeculateBenchArgs,
    ThroughputArgs,
)
from quire_lab.eval.args import EvalArgs
from quire_lab.quantize.args import QuantizeArgs

HEAD = """\
# The command line

Written by `python tools/cli_docs.py` from the tables of settings and `src/quire/settings.toml`; a test compares them.

    quire serve [MODEL]            serve a model over an OpenAI-compatible API; several are loaded on demand
    quire launch TOOL              start a coding agent or another tool with a server's model (docs/connect.md)
    quire gateway --config FILE    one address in front of many replicas (docs/gateway.md has the keys of the file)
    quire autoscale                have as many replicas behind a gateway as its load will need (docs/operations.md)
    quire run [MODEL] "prompt"     continue one text and print it as it comes
    quire chat [MODEL]             talk in the terminal; /help lists its commands, Ctrl-C stops an answer
    quire pull ORG/REPO            download what serving a model needs, into the cache of the hub
    quire list                     the models on this machine: those that ship with Quire, those in the cache
    quire rm ORG/REPO …            delete models from the cache
    quire quantize MODEL --out DIR write a smaller checkpoint that others read too (docs/quantization.md)
    quire bench serve              put load on any OpenAI-compatible server (docs/benchmarking.md)
    quire bench latency [MODEL]    batches of equal requests, without a server
    quire bench throughput [MODEL] all requests at once, without a server
    quire bench speculate [MODEL]  numbers of drafts beside plain decoding and theory
    quire profile [MODEL]          measure step times for simulate and serve --slo (and every flag of the engine)
    quire eval [MODEL] --text PATH perplexity, KL from the original, choice tasks (docs/benchmarking.md)
    quire simulate                 a workload through the real scheduler on a virtual clock (docs/simulator.md); also
                                   the workload, load and results flags of bench serve, and the engine's scheduling
    quire doctor                   what this machine has, which kernels are used and why, what to install
    quire doctor --check MODEL     read every file: do weights fit config.json, is any NaN; tokenizer; chat template
    quire plan [MODEL]             does it fit, how fast, at what cost: formulas (docs/planner.md)
    quire cockpit [URL]            a page of a running server or gateway (docs/cockpit.md)
    quire diagnose [URL]           what limits a running server, and what to change (docs/metrics.md)
    quire learn [NAME]             simulations for learning how serving works, each with its controls (docs/learn.md)
    quire keys create NAME         add an API key to a file and print it (docs/tenants.md)
    quire keys list                names, tenants and rights of the keys
    quire kv ls DIR                what a folder of --kv-disk holds, by model
    quire kv clear DIR             remove it
    quire keys rotate NAME         replace a key by a new one
    quire keys revoke NAME         remove a key
    quire ledger report            requests, tokens and price by tenant, model, day …
    quire ledger forget            delete the rows of requests older than some days
    quire replay FILE              run a recording again, and show the first difference (docs/metrics.md)
    quire version                  also quire --version

MODEL is `quill` (the default), `quill-draft`, `smollm2` (docs/models.md), a local folder, a `.gguf` file, `folder:Q8_0`
for one GGUF of several, or a hub id. Every setting can also stand in a TOML file given with `--config`; tables only
group the keys, and flags win:

    model = "quill"
    [memory]
    kv_memory = "4GiB"
    [scheduling]
    max_num_seqs = 64

¹ Rarely needed: shown by `--help-all` instead of `--help`. `quire run --help` and `quire chat --help` show ten flags.

`quire --install-completion` has the shell complete commands, flags and their values. An unknown flag is answered with
the nearest one.

The keys of the file, the keywords of `quire.LLM` and the flags are the same names (`max_num_seqs`, `--max-num-seqs`).
"""


# The tables of the gateway's file, whose settings are keys and no flags.
FILE = {
    GatewayArgs: "top",
    RoutingArgs: "`[routing]`",
    TimeoutArgs: '`[timeouts]`, and `[timeouts.paths."/v1/…"]` for one path',
    HealthArgs: "`[health]`",
    RetryArgs: "`[retries]`",
    BackendArgs: "each of `[[backends]]`; exactly one of `url`, `dns` and `file`",
    ModelArgs: "each of `[[models]]`; `split = { name = weight }` says which served models stand behind it",
    AutoArgs: "`[auto]`",
    RuleArgs: "each of `[[auto.rules]]`: all conditions that are given must hold",
    RegionArgs: "`[regions]`; `latency_ms = { region = milliseconds }` are round trips from here",
    HedgeArgs: "`[hedging]`",
    DisaggregationArgs: "`[disaggregation]`",
    FilterArgs: "each of `[[filters]]` (docs/tenants.md); `options = { … }` are arguments of the hook's constructor",
}


def row(spec: Setting, default: Any, *, is_flag: bool = True) -> str:
    flag = f"`{flag_name(spec.name) if is_flag else spec.name}`" + (" ¹" if spec.rare else "")
    shown = {None: "", True: "on", False: "off"} if default is None or isinstance(default, bool) else {}
    default = shown.get(default, f"`{default}`")
    allowed = ", ".join(spec.choices)
    if spec.low is not None or spec.high is not None:
        low, high = (
            f"{sign} {n:g}" if n is not None else "" for sign, n in (("≥", spec.low), ("≤", spec.high))
        )
        allowed = f"{low} {high}".strip()
    return f"| {flag} | {default} | {allowed} | {spec.help} |"


def document() -> str:
    parts = [HEAD]
    for title, kind in (
        ("Engine: serve, run, chat, and `quire.LLM`", EngineArgs),
        ("Server: serve", ServerArgs),
        ("Load generator: bench serve", ServeBenchArgs),
        ("Offline: bench latency", LatencyArgs),
        ("Offline: bench throughput", ThroughputArgs),
        ("Offline: bench speculate", SpeculateBenchArgs),
        ("Formulas: plan", PlanArgs),
        ("Flight recorder: replay", ReplayArgs),
        ("Step times: profile", ProfileArgs),
        ("Fidelity: eval", EvalArgs),
        ("Smaller checkpoints: quantize", QuantizeArgs),
        ("Virtual clock: simulate", SimulateArgs),
        ("Replicas by load: autoscale", AutoscaleArgs),
    ):
        groups: dict[str, list[str]] = {}
        for key, spec in settings_of(kind).items():
            groups.setdefault(spec.group, []).append(row(spec, defaults(kind)[key]))
        parts.append(f"\n## {title}\n")
        for group, rows in groups.items():
            parts.append(
                f"\n### {group}\n\n| flag | default | allowed | meaning |\n|---|---|---|---|\n"
                + "\n".join(rows)
                + "\n"
            )
    parts.append("\n## gateway.toml\n")
    for kind, title in FILE.items():
        rows = [row(spec, defaults(kind)[key], is_flag=False) for key, spec in settings_of(kind).items()]
        parts.append(
            f"\n{title}:\n\n| key | default | allowed | meaning |\n|---|---|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    return "".join(parts)


if __name__ == "__main__":
    print(document(), end="")
