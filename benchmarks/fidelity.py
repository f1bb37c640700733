"""How far each form of a real model is from its own numbers in fp32: writes benchmarks/results/fidelity.{jsonl,md}.

    make real-models ARGS="--all"
    python -m benchmarks.fidelity run --text wiki.valid.raw [--models smollm2 gemma3] [--tokens 10752]
    python -m benchmarks.fidelity run --text wiki.valid.raw --llama-cpp ENVIRONMENT/bin/python
    python -m benchmarks.fidelity write

`--llama-cpp` names the Python of an environment with llama-cpp-python and measures that alone, on the same windows and
against the same original.

`run` adds a line per model and form to the JSONL file, replacing what it has of the same machine; `write` makes the
tables from it. Windows of 512 tokens lie side by side, and all tokens of each but the first are scored. One thread, and
its processor time in place of the wall clock, so that other work on a shared machine does not count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, cast

import torch
from tools.real_models import GEMMA3, QWEN25_CODER, SMOLLM2, RealModel
from torch import Tensor

from quire.args import EngineArgs
from quire.device import detect_device
from quire.models.wheels import real_models_folder
from quire_lab.eval.args import EvalArgs
from quire_lab.eval.inputs import read_inputs
from quire_lab.eval.model import LoadedModel, find_model, original_args
from quire_lab.eval.run import Pair, evaluate, figures, work_of

RESULTS = Path(__file__).resolve().parent / "results" / "fidelity.jsonl"
CONTEXT = 512
LLAMA_CPP = "llama.cpp, as stored"
MODELS: dict[str, RealModel] = {"smollm2": SMOLLM2, "gemma3": GEMMA3, "qwen2.5-coder": QWEN25_CODER}


@dataclass(frozen=True, slots=True)
class Form:
    """A way to run a file: settings of the engine, and whether it is expanded first."""

    name: str
    settings: dict[str, Any]
    expand: bool = True


FORMS = (
    Form("as stored", {}, expand=False),
    Form("as stored, kernels of avx512", {"cpu_isa": "avx512"}, expand=False),
    Form("as stored, kernels of avx2", {"cpu_isa": "avx2"}, expand=False),
    Form("expanded to bf16", {}),
    Form("expanded, K and V in int8", {"kv_dtype": "int8"}),
    Form("expanded, `--quantize int8`", {"quantize": "int8"}),
    Form("expanded, `--quantize int4`", {"quantize": "int4"}),
)


class ProcessorTime:
    """Seconds of this process's threads."""

    def now(self) -> float:
        return time.process_time()


def eval_args(model: str, text: Path, num_tokens: int) -> EvalArgs:
    """Return what is scored of ``text``."""
    args = EvalArgs(text=str(text), against="fp32", context=CONTEXT, stride=CONTEXT, limit_tokens=num_tokens)
    if model == "gemma3":
        # It is another model in a window without BOS, and only these chunks have it each.
        return replace(args, window="llama.cpp", stride=None)
    return args


def measure(model: str, form: Form, text: Path, num_tokens: int) -> dict[str, Any]:
    """Return the line of one model in one form."""
    device = detect_device()
    file = real_models_folder() / MODELS[model].file
    engine = replace(EngineArgs(model=str(file), threads=1, packed_cache="off"), **form.settings)
    args = replace(eval_args(model, text, num_tokens), expand=form.expand)
    found = evaluate(engine, args, device, ProcessorTime())
    named = {"model": MODELS[model].name, "form": form.name, "text": text.name}
    return {**found, **named, "machine": device.name, "date": date.today().isoformat()}


class LlamaCpp:
    """llama.cpp in the place of `LoadedModel`: its hidden states are its logits already."""

    def __init__(self, python: str, file: Path, original: LoadedModel) -> None:
        script = Path(__file__).parent / "peers" / "logits_llamacpp.py"
        command = [python, str(script), str(file), str(CONTEXT)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.config = original.config
        self.num_tokens, self.seconds, self.num_bytes = 0, 0.0, 0

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits of all tokens but the last, fp32 ``[len(token_ids) - 1, vocab_size]``."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(token_ids).encode() + b"\n")
        self._child.stdin.flush()
        head = json.loads(self._child.stdout.readline())
        size = head["rows"], head["vocab_size"]
        data = self._child.stdout.read(4 * size[0] * size[1])
        self.num_tokens += len(token_ids)
        self.seconds += head["seconds"]
        self.num_bytes = head["bytes"]
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(size)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden[:, : self.config.model.spec.vocab_size]

    def close(self) -> None:
        """End the process."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


def measure_llama_cpp(python: str, model: str, text: Path, num_tokens: int) -> dict[str, Any]:
    """Return the line of llama.cpp on the file as it is stored."""
    device = detect_device()
    file = real_models_folder() / MODELS[model].file
    engine = EngineArgs(model=str(file), threads=1, packed_cache="off")
    args = eval_args(model, text, num_tokens)
    found = find_model(original_args(engine), device, expand=True)
    work = work_of(args, found, read_inputs(text), CONTEXT, CONTEXT)
    original = LoadedModel(found, work.max_tokens, ProcessorTime())
    peer = LlamaCpp(python, file, original)
    line = figures(Pair(cast("LoadedModel", peer), original), work)
    peer.close()
    original.close()
    speed = {"tokens_per_s": peer.num_tokens / peer.seconds, "bytes": peer.num_bytes, "kernels": "llama.cpp"}
    named = {"model": MODELS[model].name, "form": LLAMA_CPP, "text": text.name}
    return {**line, **speed, **named, "machine": device.name, "date": date.today().isoformat()}


def run(asked: argparse.Namespace) -> None:
    """Measure, and keep each line as soon as it is there."""
    for model in asked.models:
        for form in FORMS[:1] if asked.llama_cpp else FORMS:
            if asked.forms and not any(part in form.name for part in asked.forms):
                continue
            if asked.llama_cpp:
                line = measure_llama_cpp(asked.llama_cpp, model, asked.text, asked.tokens)
            else:
                line = measure(model, form, asked.text, asked.tokens)
            print(
                f"{line['model']}, {line['form']}: KL {line['kl_mean']:.4f}, {line['top1_agreement']:.1%}",
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
    order = {name: place for place, name in enumerate([LLAMA_CPP, *(form.name for form in FORMS)])}
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
files of `make real-models ARGS="--all"`. KL is from the same file expanded to fp32, over the full vocabulary, at
every token but the first of windows of {context} tokens ([fidelity](../../docs/benchmarking.md#fidelity)), of Gemma
in the second halves of llama.cpp's chunks, which begin with BOS. Perplexity in brackets: against fp32's. Tokens per
second are those of prompts, logits of all positions included, on one thread, by its processor time, since the machine
is shared. llama.cpp is llama-cpp-python 0.3.16, built here for AVX-512 with VNNI, on the same windows and beside the
same original; its own kernels for AMX give a perplexity of 211 for SmolLM2's Q4_1 in batches of 512 tokens, and 15.5
in batches of 8.
"""


def page(lines: list[dict[str, Any]]) -> str:
    """Return the page of all lines."""
    parts = [HEAD.format(context=CONTEXT)]
    ours = [line for line in lines if line["form"] != LLAMA_CPP]
    for where in dict.fromkeys((line["model"], line["machine"], line["kernels"]) for line in ours):
        model, machine, kernels = where
        of_it = [line for line in ours if (line["model"], line["machine"], line["kernels"]) == where]
        first = of_it[0]
        of_it += [
            line
            for line in lines
            if (line["model"], line["machine"], line["form"]) == (*where[:2], LLAMA_CPP)
        ]
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
    measuring.add_argument("--llama-cpp", metavar="PYTHON", help="measure llama.cpp with this Python")
    measuring.add_argument("--tokens", type=int, default=10_752)
    commands.add_parser("write")
    asked = parser.parse_args()
    if asked.command == "run":
        run(asked)
    RESULTS.with_suffix(".md").write_text(page(read()))


if __name__ == "__main__":
    main()
