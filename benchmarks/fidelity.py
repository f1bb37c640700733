"""How far each form of a real model is from its own numbers in fp32: writes benchmarks/results/fidelity.{jsonl,md}.

    make real-models ARGS="--all"
    python -m benchmarks.fidelity run --text wiki.valid.raw [--models smollm2 gemma3] [--tokens 10752]
    python -m benchmarks.fidelity run --text wiki.valid.raw --llama-cpp ENVIRONMENT/bin/python
    python -m benchmarks.fidelity run --text wiki.valid.raw --openvino ENVIRONMENT/bin/python --converted FOLDER
    python -m benchmarks.fidelity speed --text wiki.valid.raw --llama-cpp … --openvino … --converted FOLDER
    python -m benchmarks.fidelity write

`--llama-cpp` and `--openvino` name the Python of an environment with that peer. `run` then measures the peer alone, on
the same windows and against the same original. `--converted` has OpenVINO's models, as MODEL-int8 and MODEL-int4
(benchmarks/peers/expand_gguf.py makes them); GenAI's own reading of the file is measured as well, where it reads it.

`run` adds a line per model and form to the JSONL file, replacing what it has of the same machine; `speed` adds prompts
and decode of all forms and peers to these lines, in turns (`benchmarks.fidelity_speed`); `write` makes the tables.
Windows of 512 tokens lie side by side, and all tokens of each but the first are scored. One thread, and its processor
time in place of the wall clock, so that other work on a shared machine does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, cast

import torch
from benchmarks.fidelity_speed import Child, Timed, TimedModel, speeds
from tools.real_models import GEMMA3, QWEN25_CODER, SMOLLM2, RealModel
from torch import Tensor

from quire.args import EngineArgs
from quire.device import detect_device
from quire.models.wheels import real_models_folder
from quire_lab.eval.args import EvalArgs
from quire_lab.eval.inputs import read_inputs
from quire_lab.eval.model import LoadedModel, find_model, original_args
from quire_lab.eval.run import Pair, evaluate, figures, planned_work

RESULTS = Path(__file__).resolve().parent / "results" / "fidelity.jsonl"
CONTEXT = 512
LLAMA_CPP = "llama.cpp, as stored"
OPENVINO = "OpenVINO, the file as GenAI reads it"
PEERS = (LLAMA_CPP, OPENVINO, "OpenVINO, int8", "OpenVINO, int4")
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
    Form("expanded, `--quantize int8`", {"quantize": "int8"}),
    Form("expanded, `--quantize int4`", {"quantize": "int4"}),
    Form("expanded, `--quantize int4-g16`", {"quantize": "int4-g16"}),
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


class PeerModel:
    """A peer in the place of `LoadedModel`: its hidden states are its logits already."""

    def __init__(self, child: Child, original: LoadedModel) -> None:
        self._child = child
        self.config = original.config
        self.num_tokens, self.seconds, self.num_bytes = 0, 0.0, 0

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits of all tokens but the last, fp32 ``[len(token_ids) - 1, vocab_size]``."""
        head, data = self._child.ask("logits", token_ids)
        self.num_tokens += len(token_ids)
        self.seconds += head["seconds"]
        self.num_bytes = head["bytes"]
        return torch.frombuffer(bytearray(data), dtype=torch.float32).view(head["rows"], head["vocab_size"])

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden[:, : self.config.model.spec.vocab_size]


def peers(asked: argparse.Namespace, model: str) -> dict[str, tuple[str, str, Path]]:
    """Return form → (Python, script, file or folder) of the peers that were asked for."""
    file = real_models_folder() / MODELS[model].file
    found: dict[str, tuple[str, str, Path]] = {}
    if asked.llama_cpp:
        found[LLAMA_CPP] = (asked.llama_cpp, "child_llamacpp.py", file)
    if asked.openvino:
        found[OPENVINO] = (asked.openvino, "child_openvino.py", file)
        for bits in ("int8", "int4"):
            folder = asked.converted / f"{model}-{bits}" if asked.converted else None
            if folder is not None and folder.is_dir():
                found[f"OpenVINO, {bits}"] = (asked.openvino, "child_openvino.py", folder)
    return found


def measure_peer(form: str, child: Child, model: str, text: Path, num_tokens: int) -> dict[str, Any]:
    """Return the line of a peer."""
    device = detect_device()
    file = real_models_folder() / MODELS[model].file
    engine = EngineArgs(model=str(file), threads=1, packed_cache="off")
    args = eval_args(model, text, num_tokens)
    found = find_model(original_args(engine), device, expand=True)
    work = planned_work(args, found, read_inputs(text), CONTEXT, CONTEXT)
    original = LoadedModel(found, work.max_tokens, ProcessorTime())
    peer = PeerModel(child, original)
    line = figures(Pair(cast("LoadedModel", peer), original), work)
    original.close()
    speed = {"tokens_per_s": peer.num_tokens / peer.seconds, "bytes": peer.num_bytes}
    named = {"model": MODELS[model].name, "form": form, "text": text.name, "kernels": form.partition(",")[0]}
    return {**line, **speed, **named, "machine": device.name, "date": date.today().isoformat()}


def lines_of(asked: argparse.Namespace, model: str) -> Iterator[dict[str, Any]]:
    """Yield the line of each form or peer that was asked for."""
    chosen = peers(asked, model)
    if not chosen:
        for form in FORMS:
            if not asked.forms or any(part in form.name for part in asked.forms):
                yield measure(model, form, asked.text, asked.tokens)
    for form, command in chosen.items():
        child = Child(*command, CONTEXT)
        try:
            yield measure_peer(form, child, model, asked.text, asked.tokens)
        except RuntimeError as error:
            print(f"{form} does not run {model}: {error}", flush=True)
        child.close()


def run(asked: argparse.Namespace) -> None:
    """Measure, and keep each line as soon as it is there."""
    for model in asked.models:
        for line in lines_of(asked, model):
            print(
                f"{line['model']}, {line['form']}: KL {line['kl_mean']:.4f}, {line['top1_agreement']:.1%}",
                flush=True,
            )
            kept = [old for old in read() if key_of(old) != key_of(line)]
            write_lines([*kept, line])


def speed(asked: argparse.Namespace) -> None:
    """Add prompts and decode of all forms and peers of a model, taken in turns, to the lines of `run`."""
    device = detect_device()
    for model in asked.models:
        file = real_models_folder() / MODELS[model].file
        timed: dict[str, Timed] = {}
        ids: Sequence[int] = ()
        for form in FORMS:
            engine = replace(EngineArgs(model=str(file), threads=1, packed_cache="off"), **form.settings)
            found = find_model(engine, device, expand=form.expand)
            ids = ids or found.tokenizer.encode(asked.text.read_text()[:20_000])[:CONTEXT]
            timed[form.name] = TimedModel(found)
        for name, command in peers(asked, model).items():
            child = Child(*command, CONTEXT)
            try:
                child.prompt_s(ids[:8])
            except RuntimeError as error:
                print(f"{name} does not run {model}: {error}", flush=True)
                continue
            timed[name] = child
        found_speeds = speeds(timed, ids, asked.rounds)
        for line in (lines := read()):
            if line["model"] == MODELS[model].name and line["machine"] == device.name:
                line |= found_speeds.get(line["form"], {})
        write_lines(lines)
        for name, figures_of in found_speeds.items():
            print(model, name, {key: round(value, 1) for key, value in figures_of.items()}, flush=True)


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a line is of: a later line of the same replaces it."""
    return tuple(line[key] for key in ("model", "form", "machine", "kernels"))


def write_lines(lines: Iterable[dict[str, Any]]) -> None:
    """Keep ``lines``."""
    RESULTS.write_text("".join(json.dumps(each) + "\n" for each in lines))


def read() -> list[dict[str, Any]]:
    """Return the lines that were kept."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def table(lines: Iterable[dict[str, Any]]) -> list[str]:
    """Return the table of one model on one machine."""
    rows = [
        "| form | mean KL, nats | 99 % | 99.9 % | same top token | perplexity | MB of weights | prompt, tokens/s | "
        "decode, tokens/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    order = {name: place for place, name in enumerate([*PEERS, *(form.name for form in FORMS)])}
    for line in sorted(lines, key=lambda each: order[each["form"]]):
        last = "–" if line["kl_p999"] is None else f"{line['kl_p999']:.3g}"
        more = line["perplexity"] / line["perplexity_original"] - 1
        speed_cells = [
            f"{line[key]:,.0f}" if key in line else "–"
            for key in ("prompt_tokens_per_s", "decode_tokens_per_s")
        ]
        rows.append(
            f"| {line['form']} | {line['kl_mean']:.4f} ± {line['kl_mean_se']:.4f} | {line['kl_p99']:.3g} | {last} | "
            f"{line['top1_agreement']:.1%} | {line['perplexity']:.2f} ({more:+.1%}) | {line['bytes'] / 1e6:.0f} | "
            f"{' | '.join(speed_cells)} |"
        )
    return rows


def readme_cell(line: dict[str, Any]) -> str:
    """Return tokens/s of prompts, of decode, and the mean KL; the KL alone where no speed was measured."""
    speeds = [f"{line[key]:,.0f}" for key in ("prompt_tokens_per_s", "decode_tokens_per_s") if key in line]
    return "/".join([*speeds, f"{line['kl_mean']:.4f}"])


def readme_table() -> list[str]:
    """Return README's table: each file as it is stored, and its peers, on the machine of the last line."""
    lines = read()
    machine = lines[-1]["machine"]
    columns = {"Quire": "as stored", "llama.cpp": LLAMA_CPP, "OpenVINO, int8": "OpenVINO, int8"}
    rows = [f"| file | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for real in MODELS.values():
        found = {
            line["form"]: readme_cell(line)
            for line in lines
            if (line["model"], line["machine"]) == (real.name, machine)
        }
        rows.append(f"| {real.name} | {' | '.join(found.get(form, '–') for form in columns.values())} |")
    return rows


HEAD = """\
# Fidelity of real models

Written by `python -m benchmarks.fidelity write`; measured by `python -m benchmarks.fidelity run --text FILE` (KL) and
`speed` (tokens/s), with the files of `make real-models ARGS="--all"`. KL is from the same file expanded to fp32, over
the full vocabulary, at every token but the first of windows of {context} tokens
([fidelity](../../docs/benchmarking.md#fidelity)), of Gemma in the second halves of llama.cpp's chunks, which begin with
BOS. Perplexity in brackets: against fp32's. Tokens per second are medians of rounds in which all forms and peers take
turns, on one thread, by its processor time, since the machine is shared: a prompt of 512 tokens with the logits of its
last one, and 64 decode steps of one token. Five to seven other users were at work on two cores (load 15 to 26), so only
ratios compare, and only within a set of rounds:

- SmolLM2 (2026-11-28, five rounds): by the engine's core, with its scheduler and sampler, as a server computes. As
  stored Quire decodes 2.57 times as fast as llama.cpp (2.08 … 2.80), and reads prompts 10.0 times as fast
  (8.7 … 10.9).
- OpenVINO on SmolLM2, and the other models (five rounds, two of Qwen2.5-Coder): of an earlier set, in which llama.cpp
  had 159 and 55 on SmolLM2. Quire's decode steps ran call by call there, as `quire eval` takes hidden states and no
  server does: 75 on SmolLM2, 1.36 times llama.cpp's.

KL was measured on other days: of SmolLM2 and Gemma as stored (kernels of amx) and of `int4` on SmolLM2 on 2026-11-28,
of the rest before sums of layers stayed fp32 on CPUs, which takes up to 0.0004 off
([measured](residual-2026-11-28.md)). Gemma 3 in `int4` is in [another table](int4-mixed-2026-11-28.md).

llama.cpp is llama-cpp-python 0.3.16, built here for AVX-512 with VNNI, on the same windows and beside the same
original; its own kernels for AMX give a perplexity of 211 for SmolLM2's Q4_1 in batches of 512 tokens, and 15.5 in
batches of 8.
{openvino}"""
OPENVINO_NOTE = """
OpenVINO is 2026.4.1, with its CPU plugin's defaults for one thread. Its own reading of a GGUF file (GenAI 2026.4.1)
knows the types of SmolLM2's alone. The others are the file expanded by transformers (`benchmarks/peers/expand_gguf.py`)
and converted by optimum-intel 2.2 and nncf 3.4: int8 and int4 (groups of 64 where 128 does not divide the inputs).
optimum-intel does not convert Gemma 3 with the transformers (5.5.4) that it was installed with.
"""


def page(lines: list[dict[str, Any]]) -> str:
    """Return the page of all lines."""
    parts = [HEAD.format(context=CONTEXT, openvino=OPENVINO_NOTE)]
    ours = [line for line in lines if line["form"] not in PEERS]
    for where in dict.fromkeys((line["model"], line["machine"], line["kernels"]) for line in ours):
        model, machine, kernels = where
        of_it = [line for line in ours if (line["model"], line["machine"], line["kernels"]) == where]
        first = of_it[0]
        of_it += [
            line for line in lines if (line["model"], line["machine"]) == where[:2] and line["form"] in PEERS
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
    measuring, timing = commands.add_parser("run"), commands.add_parser("speed")
    for each in (measuring, timing):
        each.add_argument("--text", type=Path, required=True)
        each.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
        each.add_argument("--llama-cpp", metavar="PYTHON", help="llama.cpp with this Python")
        each.add_argument("--openvino", metavar="PYTHON", help="OpenVINO with this Python")
        each.add_argument("--converted", metavar="FOLDER", type=Path, help="OpenVINO's models")
    measuring.add_argument("--forms", nargs="*", default=[], help="parts of the names of forms")
    measuring.add_argument("--tokens", type=int, default=10_752)
    timing.add_argument("--rounds", type=int, default=5)
    commands.add_parser("write")
    asked = parser.parse_args()
    if asked.command == "run":
        run(asked)
    elif asked.command == "speed":
        speed(asked)
    RESULTS.with_suffix(".md").write_text(page(read()))
    print("\n".join(readme_table()))


if __name__ == "__main__":
    main()
