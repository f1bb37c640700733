"""How far each form of a real model is from its own numbers in fp32: writes benchmarks/results/fidelity.{jsonl,md}.

    make real-models ARGS="--all"
    python -m benchmarks.fidelity run --text wiki.valid.raw [--models smollm2 gemma3] [--tokens 10752]
    python -m benchmarks.fidelity write

`run` adds a line per model and form to the JSONL file, replacing what it has of the same machine; `write` makes the
tables from it. Windows of 512 tokens lie side by side, and all tokens of each but the first are scored. One thread, and
its processor time in place of the wall clock, so that other work on a shared machine does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from tools.real_models import GEMMA3, QWEN25_CODER, SMOLLM2, RealModel

from quire.args import EngineArgs
from quire.device import detect_device
from quire.models.wheels import real_models_folder
from quire_lab.eval.args import EvalArgs
from quire_lab.eval.run import evaluate

RESULTS = Path(__file__).resolve().parent / "results" / "fidelity.jsonl"
CONTEXT = 512
MODELS: dict[str, RealModel] = {"smollm2": SMOLLM2, "gemma3": GEMMA3, "qwen2.5-coder": QWEN25_CODER}


@dataclass(frozen=True, slots=True)
class Form:
    """A way to run a file: settings of the engine, and whether it is expanded first."""

    name: str
    settings: dict[str, Any]
    expand: bool = True


FORMS = (
    Form("as stored", {}, expand=False),
    Form("expanded to bf16", {}),
    Form("expanded, K and V in int8", {"kv_dtype": "int8"}),
    Form("expanded, `--quantize int8`", {"quantize": "int8"}),
    Form("expanded, `--quantize int4`", {"quantize": "int4"}),
)


class ProcessorTime:
    """Seconds of this process's threads."""

    def now(self) -> float:
        return time.process_time()


def measure(model: str, form: Form, text: Path, num_tokens: int) -> dict[str, Any]:
    """Return the line of one model in one form."""
    device = detect_device()
    file = real_models_folder() / MODELS[model].file
    engine = replace(EngineArgs(model=str(file), threads=1, packed_cache="off"), **form.settings)
    args = EvalArgs(
        text=str(text),
        against="fp32",
        expand=form.expand,
        context=CONTEXT,
        stride=CONTEXT,
        limit_tokens=num_tokens,
    )
    if model == "gemma3":
        # It is another model in a window without BOS, and only these chunks have it each.
        args = replace(args, window="llama.cpp", stride=None)
    found = evaluate(engine, args, device, ProcessorTime())
    named = {"model": MODELS[model].name, "form": form.name, "text": text.name}
    return {**found, **named, "machine": device.name, "date": date.today().isoformat()}


def run(asked: argparse.Namespace) -> None:
    """Measure, and keep each line as soon as it is there."""
    for model in asked.models:
        for form in FORMS:
            if asked.forms and not any(part in form.name for part in asked.forms):
                continue
            line = measure(model, form, asked.text, asked.tokens)
            print(
                f"{line['model']}, {form.name}: KL {line['kl_mean']:.4f}, {line['top1_agreement']:.1%}",
                flush=True,
            )
            key = ("model", "form", "machine", "kernels")
            kept = [old for old in read() if any(old[k] != line[k] for k in key)]
            RESULTS.write_text("".join(json.dumps(each) + "\n" for each in [*kept, line]))


def read() -> list[dict[str, Any]]:
    """Return the lines that were kept."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Return the table of one model on one machine."""
    rows = [
        "| form | mean KL, nats | 99 % | 99.9 % | same top token | perplexity | MB of weights | prompt tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = {form.name: place for place, form in enumerate(FORMS)}
    for line in sorted(lines, key=lambda each: order[each["form"]]):
        last = "–" if line["kl_p999"] is None else f"{line['kl_p999']:.3g}"
        more = line["perplexity"] / line["perplexity_original"] - 1
        rows.append(
            f"| {line['form']} | {line['kl_mean']:.4f} ± {line['kl_mean_se']:.4f} | {line['kl_p99']:.3g} | {last} | "
            f"{line['top1_agreement']:.1%} | {line['perplexity']:.2f} ({more:+.1%}) | {line['bytes'] / 1e6:.0f} | "
            f"{line['tokens_per_s']:,.0f} |"
        )
    return rows


HEAD = """\
# Fidelity of real models

Written by `python -m benchmarks.fidelity write`; measured by `python -m benchmarks.fidelity run --text FILE` with the
files of `make real-models ARGS="--all"`. KL is from the same file expanded to fp32, over the full vocabulary, at every
token but the first of windows of {context} tokens ([docs/eval.md](../../docs/eval.md)), of Gemma in the second halves
of llama.cpp's chunks, which begin with BOS. Perplexity in brackets: against fp32's. Tokens per second are those of
prompts, on one thread, by its processor time, since the machine is shared. llama.cpp is not in these tables: the
package index that this machine reaches has no wheel of it.
"""


def page(lines: list[dict[str, Any]]) -> str:
    """Return the page of all lines."""
    parts = [HEAD.format(context=CONTEXT)]
    for where in dict.fromkeys((line["model"], line["machine"], line["kernels"]) for line in lines):
        model, machine, kernels = where
        of_it = [line for line in lines if (line["model"], line["machine"], line["kernels"]) == where]
        first = of_it[0]
        parts.append(
            f"## {model}\n\n{machine}, kernels of {kernels}, {first['date']}; {first['num_positions']:,} tokens of "
            f"{first['text']}; perplexity in fp32 {first['perplexity_original']:.2f}.\n\n"
            + "\n".join(table(of_it))
            + "\n"
        )
    return "\n".join(parts)


def main() -> None:
    """Measure or write, as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("run")
    measuring.add_argument("--text", type=Path, required=True)
    measuring.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    measuring.add_argument("--forms", nargs="*", default=[], help="parts of the names of forms")
    measuring.add_argument("--tokens", type=int, default=10_752)
    commands.add_parser("write")
    asked = parser.parse_args()
    if asked.command == "run":
        run(asked)
    RESULTS.with_suffix(".md").write_text(page(read()))


if __name__ == "__main__":
    main()
