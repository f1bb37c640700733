"""Lines of ``quire plan --explain`` on what limits a plan (roofline, links, waiting, experts), on power and money."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from quire.cost.cost_model import StepFeatures, chunk_pairs
from quire.cost.efficiency import IDEAL
from quire.cost.roofline import LinkUse, Roofline
from quire.parallel.traffic import Kind
from quire_lab.plan.capacity import CapacityPlan, Option, Question
from quire_lab.plan.explain_line import Line, ms
from quire_lab.plan.laws import (
    HOURS_PER_MONTH,
    SECONDS_PER_DAY,
    WORDS_PER_TOKEN,
    break_even,
    bubble,
    cost_per_million,
    imbalance,
    intensity,
    owned_per_hour,
    ridge_point,
)

BATCHES = (1, 8, 32, 128)
COLLECTIVES = {
    "all_reduce": "all-reduce{s}", "all_gather": "gather{s}", "all_to_all": "exchange{s} of partial attention",
    "gather_parts": "exchange{s} of experts' results", "dispatch": "exchange{s} of experts' rows",
    "send": "send{s} to the next stage",
}  # fmt: skip


def limits(plan: CapacityPlan) -> list[Line]:
    """Return what the roofline, the links and the split make of the chosen option."""
    q, chosen, steps, running = _chosen(plan)
    lines = _roofline(plan, steps) if q.hardware.rate(q.precision) else []
    decode = StepFeatures(running, running, running, round(running * (q.load.isl + q.load.osl / 2)), 0, 0)
    ideal, real = replace(steps, efficiency=IDEAL).seconds(decode), steps.seconds(decode)
    lines.append(
        Line(
            "step at the roofline",
            ms(ideal),
            f"nothing lost; with the constants {ms(real)}: {ideal / real:.0%} of it",
        )
    )
    lines += _links(plan, steps, running)
    assert chosen.estimate is not None
    rate, total = 1 / chosen.estimate.tpot_s, chosen.estimate.rate * chosen.split.dp * q.load.osl
    lines.append(
        Line("words", f"{rate * WORDS_PER_TOKEN:.1f}/s", f"{WORDS_PER_TOKEN} a token · {rate:.1f} tokens/s a request; "
             f"all together {total * WORDS_PER_TOKEN:,.0f}/s")
    )  # fmt: skip
    stages, chunks = chosen.split.pp, -(-(q.load.isl - q.load.prefix) // q.chunk)
    if stages > 1:
        idle = max(0.0, 1 - chosen.estimate.concurrency / stages)
        text = f"({stages} − 1) / ({chunks} chunks + {stages} − 1) of a prompt alone; of decodes {idle:.0%}"
        lines.append(Line("pipeline bubble", f"{bubble(stages, chunks):.0%}", text))
    return lines + _experts(steps, running)


def _chosen(plan: CapacityPlan) -> tuple[Question, Option, Roofline, int]:
    q, chosen = plan.question, plan.advice.chosen
    assert chosen is not None
    assert chosen.estimate is not None
    steps = q.replica(chosen.split, chosen.memory).steps
    assert isinstance(steps, Roofline)
    return q, chosen, steps, max(1, ceil(chosen.estimate.concurrency / chosen.split.pp))


def _roofline(plan: CapacityPlan, steps: Roofline) -> list[Line]:
    """Return the ridge point, and where decode steps of several batches and a prompt lie."""
    q, chosen, _, running = _chosen(plan)
    ridge, rate = ridge_point(q.hardware, q.precision), q.hardware.rate(q.precision) or 0.0
    lines = [
        Line("ridge point", f"{ridge:,.0f} op/B",
             f"{rate / 1e12:,.0f}e12 op/s of {q.precision} / {q.hardware.bandwidth / 1e9:,.0f} GB/s")
    ]  # fmt: skip
    most, context = q.max_running(chosen.split), q.load.isl + q.load.osl / 2
    batches = sorted({b for b in (*BATCHES, running, most) if b <= most})
    named = [(f"intensity, batch {b}", StepFeatures(b, b, b, round(b * context), 0, 0)) for b in batches]
    rows = min(q.load.isl, q.max_num_batched_tokens)
    named.append((f"intensity, prompt of {rows:,}", StepFeatures(rows, 1, 1, 0, rows, chunk_pairs(0, rows))))
    for name, step in named:
        point = intensity(steps, step)
        bound = "compute" if point.per_byte > ridge else "memory"
        text = (
            f"{point.operations / 1e9:,.0f}e9 op / {point.bytes / 1e9:,.2f} GB a device: bound by {bound}; "
        )
        text += f"{point.utilization:.1%} of its op/s in {ms(point.seconds)}"
        lines.append(Line(name, f"{point.per_byte:,.1f} op/B", text))
    return lines


def _links(plan: CapacityPlan, steps: Roofline, running: int) -> list[Line]:
    """Return what a device sends over each kind of link in a decode step and with a prompt."""
    q, lines = plan.question, []
    rows = min(q.load.isl, q.max_num_batched_tokens)
    decode, prompt = steps.link_uses(running, running), steps.link_uses(rows, 1)
    for axis in dict.fromkeys(link.use.axis for link in (*decode, *prompt)):
        own = [link for link in decode if link.use.axis == axis]
        kinds = dict.fromkeys(link.use.kind for link in own)
        texts = [_said(kind, [link for link in own if link.use.kind == kind]) for kind in kinds]
        sources = {_source(link) for link in own}
        seconds = sum(link.use.count * link.seconds for link in own)
        of_prompt = sum(link.total_bytes for link in prompt if link.use.axis == axis)
        text = f"{' + '.join(texts)} {', '.join(sorted(sources))} in {ms(seconds)}; "
        text += f"a prompt's {rows:,} rows {of_prompt / 1e6:,.1f} MB"
        total = sum(link.total_bytes for link in own)
        lines.append(Line(f"{axis} link, batch {running}", f"{total / 1e6:,.2f} MB", text))
    return lines


def _source(link: LinkUse) -> str:
    if link.transport == "gloo":
        return "over the network"
    return "as measured" if link.speed is None else f"at {link.speed / 1e9:,.0f} GB/s"


def _said(kind: Kind, links: list[LinkUse]) -> str:
    count = sum(link.use.count for link in links)
    sizes = sorted(
        {f"{link.num_bytes / 1e3:,.1f}" for link in links}, key=lambda text: float(text.replace(",", ""))
    )
    least = f"{sizes[0]} … " if len(sizes) > 1 else ""
    return f"{count} {COLLECTIVES[kind].format(s='s' * (count > 1))} of {least}{sizes[-1]} kB"


def _experts(steps: Roofline, running: int) -> list[Line]:
    work = steps.work
    if not work.num_experts:
        return []
    bins = work.split.ep if work.split.ep > 1 else work.num_experts
    what = "rank" if work.split.ep > 1 else "expert"
    text = f"fullest {what} of {bins} over the mean: {running} rows · {work.top_k} experts, routed evenly at random"
    return [Line("expert imbalance", f"{imbalance(running * work.top_k, bins):.2f} ×", text)]


def money(
    plan: CapacityPlan,
    api_usd_per_million: float | None,
    usd_per_kwh: float,
    people_usd_per_month: float = 0.0,
) -> list[Line]:
    """Return the energy of a token, and rent against spot, purchase and an API, which needs fewer people."""
    q, chosen = plan.question, plan.advice.chosen
    hw = q.hardware
    if chosen is None or chosen.estimate is None:
        return []
    count, served = chosen.split.num_devices, chosen.estimate.rate * chosen.split.dp
    watts, lines = (hw.watts or 0.0) * count, []
    if hw.watts:
        joules = watts / (served * q.load.osl)
        text = f"{count} · {hw.watts:,.0f} W at most / {served * q.load.osl:,.0f} output tokens/s; "
        kwh = joules * 1e6 / 3.6e6
        text += f"{kwh:,.1f} kWh a million, ${kwh * usd_per_kwh:.2f} at ${usd_per_kwh:g}/kWh"
        lines.append(Line("energy of a token out", f"{joules:,.2f} J", text))
    rent = hw.price.usd * count if hw.price else None
    if rent and hw.spot_usd and hw.price and hw.price.source != "--price":
        lines.append(
            Line(
                "spot",
                f"${hw.spot_usd * count:.2f}/h",
                f"{1 - hw.spot_usd / hw.price.usd:.0%} less; may be taken away",
            )
        )
    if hw.purchase_usd:
        price = hw.purchase_usd * count
        own = owned_per_hour(price, watts, usd_per_kwh)
        text = f"${price:,.0f} (an example) over 3 years + {watts / 1000:,.1f} kW, without host and cooling"
        power = watts / 1000 * usd_per_kwh
        if rent and rent > power:
            text += (
                f"; bought is cheaper than rented after {price / (rent - power) / 24:,.0f} days of running"
            )
        lines.append(Line("own devices", f"${own:.2f}/h", text))
    if rent:
        capacity = chosen.capacity * (q.load.isl + q.load.osl)
        lines.append(_api(rent, people_usd_per_month / HOURS_PER_MONTH, capacity, api_usd_per_million))
    return lines


def _api(rent: float, people: float, capacity: float, api: float | None) -> Line:
    """Return from where on rent and people (USD an hour) are less than an API's price.

    ``capacity``: tokens/s, in and out, at most.
    """
    if not capacity:
        return Line("API break-even", "never", "these devices serve nothing within the SLO")
    own = rent + people
    full, most = cost_per_million(own, capacity), capacity * SECONDS_PER_DAY
    what = f"(${rent:.2f} rent + ${people:.2f} people)/h" if people else f"${rent:.2f}/h"
    if api is None:
        text = f"a million tokens, all, at full load ({most / 1e6:,.0f} million a day): an API above that costs more"
        return Line("API break-even", f"${full:.3f}", f"{text}; {what}" if people else text)
    tokens = break_even(own, api)
    text = f"{what} · 24 / ${api:g} a million, in and out; full load is {most / 1e6:,.0f} million a day"
    return Line(
        "API break-even", f"{tokens / 1e6:,.1f} million tokens a day" if tokens <= most else "never", text
    )
