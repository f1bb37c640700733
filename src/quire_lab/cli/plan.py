"""`quire plan`: the figures of `quire_lab.plan.capacity` as tables or as one JSON object."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from quire.args import EngineArgs, ServerArgs, flag_name
from quire.cli.flags import PlanArgs
from quire.cli.weight_tables import MEASURE, form_table, product_table
from quire.config import MAX_DRAFTS
from quire.cost.efficiency import MEASURED, efficiency_of
from quire.cost.hardware import HERE, Hardware, Price, find_hardware, hardware_named, this_machine
from quire.cost.kept_profiles import kept
from quire.cost.links import Links
from quire.cost.presets import preset_of
from quire.cost.profile import load_profile
from quire.device import detect_device
from quire.errors import ConfigError
from quire.models.checkpoint import spec_of
from quire.slo import Slo
from quire.weight_plan import kinds_of
from quire_lab.bench.progress import ticking
from quire_lab.cli.hardware_list import show_hardware
from quire_lab.cli.plan_compare import compare, comparison_table, read_plan
from quire_lab.cli.plan_measured import measured_here, measured_lines
from quire_lab.cli.plan_tables import advice_table, memory_table, search_table, speed_table
from quire_lab.cli.plan_weights import form_flag, planned_products, quantize_flag, weights_of
from quire_lab.plan.advice import advice
from quire_lab.plan.by_engine import by_engine
from quire_lab.plan.candidates import parse_split
from quire_lab.plan.capacity import NEAR, CapacityPlan, Question, plan_capacity
from quire_lab.plan.draft import Draft
from quire_lab.plan.estimate import Load
from quire_lab.plan.explain import explain
from quire_lab.plan.explain_line import Line
from quire_lab.sim.search import Found, Search
from quire_lab.workload.build import Synthetic, at_rate, from_trace
from quire_lab.workload.distributions import Arrivals, Fixed, parse_workload
from quire_lab.workload.traces import read_trace

NUM_REQUESTS = 300  # requests that --search simulates
MEANS = 10_000  # lengths of a distribution whose mean is taken


def question_of(args: PlanArgs) -> Question:
    """Return the question that the flags ask.

    Raises:
        ConfigError: a flag is wrong; the message says what is allowed.
        ModelLoadError, UnsupportedModelError: the model's configuration cannot be read.
    """
    hardware = hardware_of(args)
    spec = spec_of(args.model)  # may ask the hub, so the errors above come first
    isl, osl = mean_lengths(args.workload)
    weights = weights_of(args.model, args.quantize, spec, hardware)
    kv_dtype = args.kv_dtype or "bf16"
    if kv_dtype not in ("bf16", "fp8", "int8"):
        raise ConfigError(f"--kv-dtype {kv_dtype!r} must be one of bf16, fp8, int8")
    if args.count < 1:
        raise ConfigError(f"--count {args.count} must be at least 1")
    if args.rate is not None and args.rate <= 0:
        raise ConfigError(f"--rate {args.rate:g} must be more than 0 requests per second")
    if not 0 <= args.prefix < isl:
        raise ConfigError(
            f"--prefix {args.prefix} must be in 0…{isl - 1}, less than the prompt's {isl} tokens"
        )
    engine = args.engine or ("cpu" if hardware.kind == "cpu" else "default")
    efficiency_of(engine, hardware, spec, weights.precision)  # refuses an unknown name
    concurrency = args.concurrency if args.rate is None else None
    return Question(
        model=args.model,
        spec=spec,
        hardware=hardware,
        count=args.count,
        load=Load(isl, osl, args.rate, concurrency if args.rate or concurrency else 1, args.prefix),
        engine=engine,
        slo=Slo.parse(args.slo) if args.slo else None,
        precision=weights.precision,
        own_precision=weights.own_precision,
        stored=weights.stored,
        forms=weights.forms,
        kv_dtype=kv_dtype,
        context=args.context,
        max_num_batched_tokens=args.max_num_batched_tokens or (2048 if hardware.kind == "cpu" else 8192),
        max_num_seqs=args.max_num_seqs,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        objective=args.objective,
        split=parse_split(args.split, spec, args.count) if args.split else None,
        draft=draft_of(args.draft) if args.draft else None,
        links=_links(args, hardware),
    )


def _links(args: PlanArgs, hardware: Hardware) -> Links | None:
    """Return the links of the profile that is given, or that was kept of this machine."""
    path = args.profile
    if path is None:
        profile = kept(args.model) if hardware.name == HERE else None
        return None if profile is None else profile[1].links
    links = load_profile(Path(path)).links
    if links is None:
        raise ConfigError(f"--profile {path!r} has no links: `quire profile --parallel` measures them")
    if hardware.kind != "cpu":
        raise ConfigError(f"--profile {path!r} has links between CPU ranks, and {hardware.name} is no CPU")
    return links


def draft_of(text: str) -> Draft:
    """Read ``MODEL,α,γ``: what drafts (``ngram``: no model), its acceptance, and drafts a round."""
    parts = text.rsplit(",", 2)
    try:
        model, acceptance, num_drafts = parts[0], float(parts[1]), int(parts[2])
    except (IndexError, ValueError):
        raise ConfigError(
            f"--draft {text!r} must be MODEL,ACCEPTANCE,DRAFTS, such as llama-3.2-1b,0.7,4 or ngram,0.3,4"
        ) from None
    if not 0.0 <= acceptance <= 1.0:
        raise ConfigError(f"--draft {text!r}: acceptance {acceptance:g} must be in 0…1")
    if not 1 <= num_drafts <= MAX_DRAFTS:
        raise ConfigError(f"--draft {text!r}: {num_drafts} drafts a round must be in 1…{MAX_DRAFTS}")
    return Draft(model, None if model == "ngram" else spec_of(model), acceptance, num_drafts)


def hardware_of(args: PlanArgs) -> Hardware:
    """Return the requested device, at the price that is given."""
    if args.price is not None and args.price <= 0:
        raise ConfigError(f"--price {args.price:g} must be more than 0 USD an hour")
    hardware = _spread(args, _device(args))
    if args.price is not None:
        hardware = replace(hardware, price=Price(args.price, "--price", "as given"))
    return replace(
        hardware, watts=args.watts or hardware.watts, purchase_usd=args.purchase or hardware.purchase_usd
    )


def _spread(args: PlanArgs, device: Hardware) -> Hardware:
    """Return ``device`` with what joins those of a machine, and of several."""
    nodes = args.nodes
    if nodes is None:
        return device
    if device.kind != "cpu":
        raise ConfigError(f"--nodes {nodes} is for CPUs: the hardware table says which GPUs a link joins")
    if args.count % nodes:
        raise ConfigError(f"--nodes {nodes} must divide --count {args.count}, the CPUs of all machines")
    return replace(device, domain=args.count // nodes, network_bandwidth=args.network_gb_s * 1e9)


def _device(args: PlanArgs) -> Hardware:
    """Return the requested device: by default this machine's GPU, else its CPU, measured now (``--cpu``)."""
    if args.cpu and args.gpu is not None:
        raise ConfigError(
            "--gpu NAME and --cpu: give one of them; without both, the plan is for this machine"
        )
    if args.gpu is not None:
        return find_hardware(args.gpu)
    device = detect_device("cpu" if args.cpu else "auto")
    if device.kind == "cuda":
        return hardware_named(device.name)
    if not device.native:
        raise ConfigError(
            "this machine is measured with the native extension, which is not built (see `quire doctor`): name a "
            "device with --gpu; --gpu list shows all"
        )
    return this_machine(device, device.num_cores)


def mean_lengths(workload: str) -> tuple[int, int]:
    """Return the mean (prompt, output) tokens of what ``--workload`` names."""
    if (lengths := parse_workload(workload)) is not None:
        prompt, output = (statistics.fmean(distribution.draw(MEANS, Random(0))) for distribution in lengths)
        return round(prompt), round(output)
    rows = read_trace(workload).rows
    if not rows:
        raise ConfigError(f"--workload {workload}: no row of the trace can be a request")
    prompt = statistics.fmean(r.num_prompt_tokens for r in rows)
    return round(prompt), max(1, round(statistics.fmean(r.num_output_tokens for r in rows)))


def serve_command(plan: CapacityPlan) -> tuple[str, list[str]]:
    """Return the ``quire serve`` line of the plan, and remarks on settings for which there is no flag yet."""
    q, chosen = plan.question, plan.advice.chosen
    known = {f.name for kind in (EngineArgs, ServerArgs) for f in fields(kind)}
    wanted: dict[str, Any] = {
        "max_model_len": q.context or (chosen.memory.max_context if chosen else q.load.isl + q.load.osl),
        "max_num_seqs": q.max_running(chosen.split) if chosen else 1,
        "max_num_batched_tokens": q.max_num_batched_tokens,
    }
    if q.long_prefill_token_threshold:
        wanted["long_prefill_token_threshold"] = q.long_prefill_token_threshold
    quantize, lacking_format = quantize_flag(q)
    if quantize is not None:
        wanted["quantize"] = quantize
    if q.kv_dtype != "bf16":
        wanted["kv_dtype"] = q.kv_dtype
    served = replace(q.slo, e2el_s=None) if q.slo is not None else Slo()
    if str(served):
        wanted["slo"] = str(served)
    if q.hardware.kind != "cpu":
        wanted["device"] = "cuda"
    ways = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "enable_expert_parallel": "ep"}
    ways["context_parallel_size"] = "cp"
    for name, short in ways.items():
        if chosen and (size := getattr(chosen.split, short)) > 1:
            wanted[name] = size if short != "ep" else True
    if chosen and q.hardware.kind == "cpu" and q.hardware.network_bandwidth is not None:
        ranks = replace(chosen.split, dp=1).num_devices
        if ranks > q.hardware.domain:
            wanted |= {"executor": "ray", "nodes": -(-ranks // q.hardware.domain)}
    if q.draft is not None:
        wanted |= {"speculate": "ngram"} if q.draft.spec is None else {"draft_model": q.draft.model}
        wanted["spec_tokens"] = q.draft.num_drafts
    if q.hardware.kind != "cpu":
        known -= {*ways, "speculate", "draft_model", "spec_tokens"}  # ranks and drafts run on CPUs
    flags = [
        flag_name(name) if v is True else f"{flag_name(name)} {shlex.quote(str(v))}"
        for name, v in wanted.items()
        if name in known
    ]
    missing = {name: value for name, value in wanted.items() if name not in known}
    where = "" if q.hardware.kind == "cpu" else " on a GPU"
    lacking = [
        f"this version has no {flag_name(name)}{where} yet (wanted: {v})" for name, v in missing.items()
    ]
    if lacking_format is not None:
        lacking.append(lacking_format)
    if q.slo is not None and q.slo.e2el_s is not None:
        lacking.append("the server holds ttft and tpot; e2el is predicted here alone")
    if q.precision == q.own_precision == "mxfp4" and q.hardware.kind != "cpu":
        lacking.append("on a GPU this version holds MXFP4 weights as int8; --quantize int8 plans that")
    if chosen and chosen.split.dp > 1:
        lacking.append(f"run {chosen.split.dp} of them, behind quire gateway")
    if preset_of(q.model) == q.model and not Path(q.model).exists():
        lacking.append(
            f"{q.model} is a name of the planner: give the model's folder, .gguf file or hub id in its place"
        )
    return " ".join(["quire serve", q.model, *flags]), lacking


def plan(args: PlanArgs) -> int:
    """Print the plan; return 0, or 2 where nothing fits."""
    if args.gpu == "list":
        return show_hardware(as_json=args.json)
    question = question_of(args)
    other = read_plan(args.compare) if args.compare else None
    tries = search(question, args.workload) if args.search else None
    answer = plan_capacity(question)
    command, lacking = serve_command(answer)
    measured = measured_here(answer)
    explained = explain(answer, args.api_price, args.power_price, args.people) if args.explain else []
    if args.json:
        report = answer.as_dict() | {"command": command, "remarks": lacking}
        report["predicted"] |= {"by_engine": figures} if (figures := by_engine(answer)) else {}
        report["advice"] = [step.as_dict() for step in advice(answer)]
        report["measured"] = measured
        report["forms"] = [form.as_dict() for form in question.forms]
        report["arithmetic"] = [one.as_dict() for one in planned_products(question)]
        if args.explain:
            report["explain"] = [asdict(line) for line in explained]
        if other is not None:
            report["compare"] = [asdict(row) for row in compare(other, report)]
        if tries is not None:
            report["search"] = asdict(tries) | {"share": NEAR}
        print(json.dumps(report, indent=1))
    else:
        _print(answer, command, [*lacking, *measured_lines(answer, measured)], explained)
        if steps := advice(answer):
            _console().print()
            _console().print(advice_table(steps, answer.question.objective))
        if other is not None:
            _console().print()
            _console().print(comparison_table(other, answer.as_dict() | {"command": command}))
        if tries is not None:
            legend = "the cheapest in bold" if tries.best else "[red]none holds the SLO[/red]"
            _console().print(f"\n{len(tries.tried)} of {tries.grid_size} settings simulated, {legend}\n")
            _console().print(search_table(tries))
    return 0 if answer.advice.chosen else 2


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=130)


def _held(q: Question) -> str:
    """Return what the weights are held in."""
    return q.precision if q.stored is None else f"stored ({kinds_of(dict(q.stored))})"


def _print(answer: CapacityPlan, command: str, lacking: list[str], explained: list[Line]) -> None:
    q = answer.question
    console = _console()
    data = answer.as_dict()
    is_moe = any(layer.mlp.moe for layer in q.spec.layers)
    active = f", {q.spec.num_active_params / 1e9:.1f} B active" if is_moe else ""
    console.print(
        f"[bold]{q.model}[/bold]  {q.spec.num_params / 1e9:.2f} B weights{active} as {_held(q)}, on "
        f"{q.count} × {q.hardware.title}\n"
    )
    for reason in answer.advice.reasons:
        console.print(reason, highlight=False)
    console.print()
    console.print(memory_table(data["memory"], q.spec.max_position_embeddings))
    if q.forms:
        console.print()
        console.print(form_table(q.forms, form_flag(q)))
    if here := planned_products(q):
        console.print()
        console.print(product_table(here))
        lacking = [*lacking, MEASURE]
    if data["predicted"]:
        console.print()
        console.print(speed_table(data, by_engine(answer)))
    console.print(f"\n  {command}", highlight=False, soft_wrap=True)
    if by_engine(answer):
        lacking = [*lacking, f"without --engine the range is that of {', '.join(MEASURED)}: engines differ"]
    for remark in lacking:
        console.print(f"  [dim]# {remark}[/dim]", highlight=False)
    if explained:
        table = Table("figure", "value", "formula", box=None, pad_edge=False)
        for line in explained:
            table.add_row(line.name, line.value, line.formula)
        console.print()
        console.print(table)


def search(question: Question, workload: str) -> Found:
    """Simulate settings of at most ``question.count`` devices under ``workload`` (a trace file, or fixed lengths).

    Raises:
        ConfigError: no rate or no SLO is given.
    """
    rate = question.load.rate
    if rate is None:
        raise ConfigError("--search needs --rate: the requests per second that the service must take")
    if Path(workload).is_file():
        trace = from_trace(
            read_trace(workload), limit=NUM_REQUESTS, max_model_len=question.spec.max_position_embeddings
        )
        return _found(Search(question, at_rate(trace, rate)))
    load = question.load
    synthetic = Synthetic(NUM_REQUESTS, Fixed(load.isl), Fixed(load.osl), Arrivals(rate))
    return _found(Search(question, synthetic.build(seed=0)))


def _found(search: Search) -> Found:
    with ticking(lambda s: f"… simulating settings for {s:.0f} s"):
        return search.find()
