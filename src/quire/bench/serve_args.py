"""The flags of `quire bench serve`, as data (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.args import flag

_LENGTHS = "512, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MAX]"


@dataclass(frozen=True, slots=True)
class ServeBenchArgs:
    """What to send where, how to count it, and where to write it."""

    url: str = flag("http://127.0.0.1:8000", "The server; any that speaks OpenAI's API.", group="Server")
    model: str | None = flag(None, "The model's name there [the first one listed].", group="Server")
    endpoint: str = flag("completions", "Which of the API's; a chat's prompts are words.", group="Server",
                         choices=("completions", "chat"))  # fmt: skip
    prompts: str = flag("ids", "Prompts of completions: ids of exact length, or words of about a token each.",
                        group="Server", choices=("ids", "words"))  # fmt: skip
    api_key: str | None = flag(None, "Sent as a bearer token.", group="Server")
    timeout_s: float = flag(600.0, "Seconds for one request.", group="Server", low=0.001)
    ready_s: float = flag(
        60.0, "Seconds that a server which answers 503 gets to load.", group="Server", low=0.0
    )
    extra_body: str | None = flag(None, "JSON object of more fields for each request.", group="Server")
    warmup: int = flag(1, "Short requests before the run; the first finds out what the server takes.", group="Server",
                       low=1)  # fmt: skip
    trace: str | None = flag(None, "File: Azure CSV, Mooncake, rtp-llm or ShareGPT-like JSONL; gzip or not.",
                             group="Workload")  # fmt: skip
    limit: int | None = flag(None, "Requests: the first N rows that fit [all; without a trace 100].", group="Workload",
                             low=1)  # fmt: skip
    time_scale: float = flag(
        1.0, "Stretches the times of the trace: 2 is half the load.", group="Workload", low=0.0
    )
    max_model_len: int | None = flag(None, "Context of the server in tokens [what it lists]; rows that do not fit are "
                                     "refused and counted.", group="Workload", low=2)  # fmt: skip
    input_len: str = flag("512", f"Prompt tokens without a trace: {_LENGTHS}.", group="Workload")
    output_len: str = flag("128", "Output tokens, the same way.", group="Workload")
    prefix_len: int = flag(0, "Tokens of a shared prefix in front of each prompt.", group="Workload", low=0)
    num_prefixes: int = flag(1, "How many different shared prefixes there are.", group="Workload", low=1)
    turns: int = flag(
        1, "Turns of a session, each behind the answer to the one before.", group="Workload", low=1
    )
    think_s: float = flag(0.0, "Mean seconds between an answer and the next turn.", group="Workload", low=0.0)
    cancel: float = flag(0.0, "Share (0…1) of the requests whose client leaves midway.", group="Workload", low=0.0,
                         high=1.0)  # fmt: skip
    vocab_size: int = flag(4096, "Prompts are token ids below this.", group="Workload", low=2)
    seed: int = flag(0, "Of arrivals, lengths, prompts and cancellations.", group="Workload", low=0)
    rate: float | None = flag(None, "Requests a second instead of the trace's times [the trace's; else all at once].",
                              group="Load")  # fmt: skip
    burstiness: float = flag(1.0, "Shape of the gamma distributed gaps: 1 Poisson, less is burstier, inf constant.",
                             group="Load")  # fmt: skip
    ramp_to: float | None = flag(None, "The rate goes linearly from --rate to this.", group="Load")
    concurrency: int | None = flag(None, "At most N requests at once; where nothing says when they arrive, a closed "
                                   "loop of N users.", group="Load", low=1)  # fmt: skip
    sweep: bool = flag(
        False, "Raise the load from --rate [1] until goodput falls, and report the knee.", group="Load"
    )
    slo: str | None = flag(None, "What goodput counts: ttft=500ms,tpot=50ms,e2el=10s.", group="Results")
    json: str | None = flag(None, "File for the summary.", group="Results")
    jsonl: str | None = flag(None, "File for one line of JSON for each request.", group="Results")
    html: str | None = flag(None, "File for a report with plots (extra bench).", group="Results")
