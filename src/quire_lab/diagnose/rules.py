"""`diagnose`: the findings that `Figures` support, the most costly one first.

A rule gives a finding with its *cost*, the share of the requests' time (or of the engine's) that is lost to it, as far
as the figures tell. The costs make an order; they do not add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire_lab.diagnose.figures import FULL, Figures

_MIN_COST = 0.05
_STALL = 5.0  # p99 of ITL over its median, from which on chunks are felt
_GOOD_STALL = 3.0  # steps with a chunk that are aimed at, in steps without


@dataclass(frozen=True, slots=True)
class Finding:
    """What limits the server."""

    name: str
    what: str
    cost: float  # 0…1
    because: tuple[str, ...]  # the figures
    change: tuple[str, ...]  # settings to change, in this order


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """``verdict``: limited, fine, idle (nothing ran) or no-step (something ran, and no step of it ended)."""

    verdict: str
    findings: tuple[Finding, ...]
    figures: Figures

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(f: Figures) -> Diagnosis:
    """Apply every rule."""
    if not f.computed_tokens and not f.rejected:
        return Diagnosis("no-step" if f.running or f.waiting else "idle", (), f)
    findings = [finding for rule in _RULES if (finding := rule(f)) is not None]
    explained = max((finding.cost for finding in findings), default=0.0)
    if (overload := _overloaded(f)) is not None:
        # The overload counts with what is left of it once the other findings are set right.
        findings.append(replace(overload, cost=overload.cost * (1.0 - explained)))
    findings = sorted(
        (finding for finding in findings if finding.cost >= _MIN_COST), key=lambda finding: -finding.cost
    )
    return Diagnosis("limited" if findings else "fine", tuple(findings), f)


def _kv_cache(f: Figures) -> Finding | None:
    if not f.preemptions and f.kv_full < 0.2:
        return None
    factor = max(1.25, min(64.0, (f.running + f.waiting) / max(1.0, f.running)))
    because = [
        f"{f.waiting:.1f} sequences waited while {f.running:.1f} ran of {_of(f.max_num_seqs)} slots",
        f"the KV cache was {f.kv_usage:.0%} full ({f.kv_blocks:,.0f} blocks)",
    ]
    if f.preemptions:
        because.append(
            f"{f.preemptions:.0f} preemptions; {f.recomputed:.0%} of all tokens were computed again"
        )
    return Finding(
        "kv-cache-too-small",
        "The KV cache is too small",
        max(f.kv_full * _queued(f), f.recomputed, 0.06 if f.preemptions else 0.0),
        tuple(because),
        (
            f"--kv-memory: {factor:.1f} times what it has now ({f.kv_blocks * factor:,.0f} blocks)",
            "--kv-dtype int8: twice as many blocks in the same memory",
            "--max-model-len: shorter, if requests do not need it",
        ),
    )


def _gate(f: Figures) -> Finding | None:
    if f.gate == "continuous" or (f.gate is None and f.prompt_share > 0.5) or f.idle_slots < 0.1:
        return None
    return Finding(
        "static-batching",
        "Sequences wait for a batch to end",
        f.idle_slots,
        (
            f"{f.waiting:.1f} sequences waited while {f.running:.1f} ran of {_of(f.max_num_seqs)} slots, "
            f"with the KV cache {f.kv_usage:.0%} full",
            f"{f.idle_slots:.0%} of the slots that they could have were idle; a request queued {_ms(f.queue_s)}",
        ),
        (f"--gate continuous (it is {f.gate or 'not known'})",),
    )


def _slots(f: Figures) -> Finding | None:
    if f.max_num_seqs is None or f.slots_full < 0.2:
        return None
    wanted = f.running + f.waiting
    fits = f.max_num_seqs / max(f.kv_usage, 0.01)
    return Finding(
        "too-few-slots",
        "The batch is limited to too few sequences",
        f.slots_full * _queued(f) * (1.0 - f.kv_usage),
        (
            f"{f.waiting:.1f} sequences waited for one of {f.max_num_seqs} slots, "
            f"all of which were taken {f.slots_full:.0%} of the time",
            f"the KV cache was {f.kv_usage:.0%} full: it has room for about {fits:,.0f} such sequences",
        ),
        (f"--max-num-seqs {max(f.max_num_seqs + 1, round(min(wanted * 1.25, fits)))}",),
    )


def _prefix_cache(f: Figures) -> Finding | None:
    missed = (f.shared or 0.0) - f.hit_rate
    if missed < 0.15 or f.prompt_share < 0.05:
        return None
    because = (
        f"{f.shared:.0%} of the prompts' tokens began as another prompt did, {f.hit_rate:.0%} came from the cache",
        f"prompts take {f.prompt_share:.0%} of the engine's time",
    )
    if f.prefix_caching is False:
        return Finding(
            "no-prefix-cache", "Prompts that begin alike are computed again and again", missed * f.prompt_share,
            because, ("--enable-prefix-caching (it is off)",),
        )  # fmt: skip
    return Finding(
        "prefix-cache-too-small",
        "Shared prefixes leave the prefix cache before they are used again",
        missed * f.prompt_share,
        (*because, f"the KV cache has {f.kv_blocks:,.0f} blocks, {f.kv_usage:.0%} of them held by sequences"),
        ("--kv-memory: more", "--order longest-prefix: requests with a cached prefix come first"),
    )


def _large_chunks(f: Figures) -> Finding | None:
    if f.itl_p99_s < _STALL * f.itl_p50_s or f.prompt_share < 0.05 or not f.itl_p50_s:
        return None
    if f.chunk_step_s is not None and f.chunk_step_s < _GOOD_STALL * (f.decode_step_s or 0.0):
        return None
    because = [
        f"ITL is {_ms(f.itl_p50_s)} at the median and {_ms(f.itl_p99_s)} at p99 "
        f"({f.itl_p99_s / f.itl_p50_s:.0f} times)"
    ]
    change = "--max-num-batched-tokens: less"
    if f.chunk_step_s and f.chunk_tokens and f.decode_step_s:
        because.append(
            f"a step with {f.chunk_tokens:.0f} tokens of prompts takes {_ms(f.chunk_step_s)}, "
            f"one without {_ms(f.decode_step_s)}"
        )
        fits = f.chunk_tokens * _GOOD_STALL * f.decode_step_s / f.chunk_step_s
        change = f"--max-num-batched-tokens {max(64, round(fits / 16) * 16)} (it is {_of(f.max_num_batched_tokens)})"
    missed = max(0.0, (f.shared or 0.0) - f.hit_rate)
    slo = f"--slo tpot={max(1.0, 1e3 * _GOOD_STALL * f.itl_p50_s):.0f}ms: chunks are then as large as that allows"
    return Finding(
        "chunk-too-large",
        "Prompt chunks hold up the sequences that decode",
        (1.0 - f.itl_p50_s / f.itl_s) * 0.9 * (1.0 - missed) * (1.0 - f.recomputed),
        tuple(because),
        (change, slo),
    )


def _small_chunks(f: Figures) -> Finding | None:
    if not (f.chunk_step_s and f.decode_step_s and f.max_num_batched_tokens) or f.chunks_per_prompt < 4:
        return None
    fixed = min(1.0, f.decode_step_s / f.chunk_step_s)
    if fixed < 0.5:
        return None
    change = f"--max-num-batched-tokens {4 * f.max_num_batched_tokens} (it is {f.max_num_batched_tokens})"
    if f.long_tokens and f.chunk_tokens and f.chunk_tokens + f.running < FULL * f.max_num_batched_tokens:
        change = (  # the steps had room for more, which long prompts may not have
            f"--long-prefill-token-threshold {4 * f.long_tokens} (it is {f.long_tokens}): short prompts then wait "
            "longer for a step with a long one"
        )
    return Finding(
        "chunk-too-small",
        "Prompts are computed in chunks that are too small",
        fixed * f.prompt_share * 0.5,
        (
            f"a prompt takes {f.chunks_per_prompt + 1:.0f} steps; one of them takes {_ms(f.chunk_step_s)}, "
            f"and one without a chunk {_ms(f.decode_step_s)}",
            f"prompts take {f.prompt_share:.0%} of the engine's time; TTFT is {_ms(f.ttft_s)}",
        ),
        (change,),
    )


def _overloaded(f: Figures) -> Finding | None:
    late = f.queue_s > 0.5 * f.ttft_s and f.waiting >= 1
    if not f.rejected and not f.deadlines and not late and f.slo_missed < 0.05:
        return None
    num_arrived = f.requests + f.rejected
    because = [
        f"{f.waiting:.1f} sequences waited; of a TTFT of {_ms(f.ttft_s)}, {_ms(f.queue_s)} were in the queue"
    ]
    if f.rejected:
        because.append(f"{f.rejected:.0f} of {num_arrived:.0f} requests were rejected")
    if f.deadlines:
        because.append(f"{f.deadlines:.0f} sequences missed their deadline")
    if f.slo_missed:
        because.append(f"{f.slo_missed:.0%} of the sequences missed the SLO")
    lost = f.rejected / num_arrived if num_arrived else 0.0
    return Finding(
        "overloaded",
        "More is asked than the server can do",
        max(lost, f.slo_missed, _queued(f) if late else 0.0, 0.06),
        tuple(because),
        (
            "--replicas, or more servers behind a gateway (docs/gateway.md, quire autoscale)",
            "--max-ttft-ms: refuse at once what would be late",
        ),
    )


def _speculation(f: Figures) -> Finding | None:
    if f.drafted < 16 or (f.draft_gain >= 1.03 and f.accepted >= 0.3):
        return None
    wasted = (1.0 - f.accepted) * f.drafted / max(1.0, f.computed_tokens)
    return Finding(
        "speculation-does-not-pay",
        "Drafts cost more than they bring",
        max(1.0 - f.draft_gain, f.draft_share or 0.0, wasted * 0.5),
        (
            f"{f.accepted:.0%} of {f.drafted:.0f} drafts were accepted; "
            f"{wasted:.0%} of all computed tokens were rejected drafts",
            f"drafting takes {f.draft_share or 0.0:.0%} of a step; the predicted gain is {f.draft_gain:.2f}",
        ),
        ("--spec-tokens auto: as many drafts as pay, none where none do", "serve without --speculate"),
    )


def _host(f: Figures) -> Finding | None:
    share = f.host_share or 0.0
    if share < 0.3 and f.api_cores < 0.85:
        return None
    return Finding(
        "host-overhead",
        "The engine waits for the host",
        max(share if share >= 0.3 else 0.0, 0.2 if f.api_cores >= 0.85 else 0.0) * 0.75,
        (
            f"{share:.0%} of a step of {_ms(f.step_s or 0.0)} is planning and applying",
            f"the API process uses {f.api_cores:.2f} cores",
        ),
        (
            "--replicas: several engines and API processes, if the machine has cores to spare",
            "--threads: one less, so that the API process has a core to itself",
        ),
    )


def _busy(f: Figures) -> Finding | None:
    uneven = f.prompt_share < 0.05 and f.itl_p50_s > 0 and f.itl_p99_s >= _STALL * f.itl_p50_s
    load = f.load_per_core or 0.0
    if load < 1.5 and not uneven:
        return None
    because = [] if f.load_per_core is None else [f"{load:.1f} processes want to run per core (load average)"]
    if uneven:
        because.append(
            f"ITL is {_ms(f.itl_p50_s)} at the median and {_ms(f.itl_p99_s)} at p99, without prompts"
        )
    return Finding(
        "busy-machine",
        "Something else uses the machine",
        0.5 * max(1.0 - 1.0 / load if load >= 1.5 else 0.0, 1.0 - f.itl_p50_s / f.itl_s if uneven else 0.0),
        tuple(because),
        (
            "end what else runs there, or give the server cores of its own (taskset, a cpuset, requests = limits)",
            "--threads: as many as it really has",
        ),
    )


_RULES: tuple[Callable[[Figures], Finding | None], ...] = (
    _kv_cache, _gate, _slots, _prefix_cache, _large_chunks, _small_chunks, _speculation, _host, _busy,
)  # fmt: skip


def _queued(f: Figures) -> float:
    """Share of the sequences that wait."""
    return f.waiting / max(1.0, f.running + f.waiting)


def _of(limit: int | None) -> str:
    return "?" if limit is None else str(limit)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1.0 else f"{seconds:.2f} s"
