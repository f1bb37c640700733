"""What each method of `quire quantize` loses and costs: writes benchmarks/results/quantize.{jsonl,md}.

    python -m benchmarks.noisy_source FILE.gguf SOURCE
    python -m benchmarks.quantize run SOURCE --calib wiki.train.raw --text wiki.valid.raw [--forms gptq-int4 …]
    python -m benchmarks.quantize write

`run` adds a line per form to the JSONL file, replacing the one of the same source and form; `write` makes the table.
KL is from the 16-bit source in fp32, over the full vocabulary, in windows of 512 tokens side by side: with the rounded
weights in fp32, and as the engine serves the file. Minutes are processor time of all threads, since the machine may be
shared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from torch import Tensor

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire_lab.eval.args import EvalArgs
from quire_lab.eval.inputs import read_inputs
from quire_lab.eval.model import LoadedModel, find_model
from quire_lab.eval.run import Pair, Work, figures, work_of
from quire_lab.quantize.args import CALIBRATED, QuantizeArgs
from quire_lab.quantize.run import quantize

RESULTS = Path(__file__).resolve().parent / "results" / "quantize.jsonl"
CONTEXT = 512
FORMS: dict[str, dict[str, Any]] = {
    "rtn-int4": {"method": "rtn"},
    "rtn-int4-zeros": {"method": "rtn", "symmetric": False},
    "awq-int4": {"method": "awq"},
    "gptq-int4": {"method": "gptq"},
    "gptq-int4-zeros": {"method": "gptq", "symmetric": False},
    "rtn-int8": {"method": "rtn", "bits": 8},
    "rtn-w8a8": {"method": "rtn", "activations": True},
    "smoothquant-w8a8": {"method": "smoothquant"},
    "fp8": {"method": "fp8"},
}
HEADER = """# What `quire quantize` loses

    python -m benchmarks.noisy_source FILE.gguf SOURCE
    python -m benchmarks.quantize run SOURCE --calib CALIB --text TEXT
    python -m benchmarks.quantize write

What this does not show yet: llama.cpp's Q4_K_M with an importance matrix, rotation, other makers' files, and the models
beside SmolLM2. The rows of SmolLM2 were typed in from what `quire quantize` and `quire eval` printed, to three digits.
Their KL is of an earlier version of the same search in torch (a newer one gave `rtn` 0.499 on 2,044 positions, in 2
seconds of processor time, which is the figure in the table); the minutes of `gptq` are of that earlier version too.

"""


class Remembered:
    """The original in fp32, whose hidden states of each window are computed once."""

    def __init__(self, model: LoadedModel) -> None:
        self.config, self._model = model.config, model
        self._hidden: dict[tuple[int, ...], Tensor] = {}

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        key = tuple(token_ids)
        if key not in self._hidden:
            self._hidden[key] = self._model.hidden(token_ids)
        return self._hidden[key]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def original(source: Path, args: EvalArgs) -> tuple[Remembered, Work]:
    engine = EngineArgs(model=str(source), dtype="float32", packed_cache="off")
    found = find_model(engine, detect_device())
    assert args.text is not None
    work = work_of(args, found, read_inputs(Path(args.text)), CONTEXT, CONTEXT)
    return Remembered(LoadedModel(found, work.max_tokens, WallClock())), work


def kl(made: Path, base: Remembered, work: Work, *, expand: bool) -> dict[str, Any]:
    engine = EngineArgs(model=str(made), packed_cache="off", dtype="float32" if expand else "auto")
    model = LoadedModel(find_model(engine, detect_device(), expand=expand), work.max_tokens, WallClock())
    found = figures(Pair(model, base), work)  # type: ignore[arg-type]
    model.close()
    keys = ("kl_mean", "kl_mean_se", "kl_p99", "top1_agreement", "perplexity", "perplexity_original")
    return {key: found[key] for key in keys} | {"num_positions": found["num_positions"]}


def run(given: argparse.Namespace) -> None:
    args = EvalArgs(text=str(given.text), context=CONTEXT, stride=CONTEXT, limit_tokens=given.tokens)
    base, work = original(given.source, args)
    for form in given.forms:
        folder = Path(tempfile.mkdtemp(prefix="quire-quantize-"))
        calib = str(given.calib) if FORMS[form]["method"] in CALIBRATED else None
        asked = replace(
            QuantizeArgs(calib=calib, calib_samples=given.samples, out=str(folder / "made")), **FORMS[form]
        )  # fmt: skip
        start_s = time.process_time()
        report = quantize(str(given.source), asked, WallClock())
        line = {
            "source": given.source.name, "form": form, "date": date.today().isoformat(),
            "machine": detect_device().name, "calib": given.calib.name, "text": given.text.name,
            "samples": given.samples, "cpu_minutes": (time.process_time() - start_s) / 60,
            "bits": report["bits_per_weight"], "bytes": report["bytes"],
            "weights": kl(folder / "made", base, work, expand=True),
            "served": kl(folder / "made", base, work, expand=False),
        }  # fmt: skip
        shutil.rmtree(folder)
        known = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
        known = [each for each in known if (each["source"], each["form"]) != (line["source"], form)]
        RESULTS.write_text("".join(json.dumps(each) + "\n" for each in [*known, line]))
        print(json.dumps(line), flush=True)


def write() -> None:
    lines = [json.loads(text) for text in RESULTS.read_text().splitlines()]
    parts = [HEADER]
    for source in dict.fromkeys(line["source"] for line in lines):
        rows = [line for line in lines if line["source"] == source]
        first = rows[0]
        parts.append(
            f"## {source}\n\n{first['machine']}, {first['date']}, {first['weights']['num_positions']:,} positions of "
            f"{first['text']}; {first['samples']} x 512 tokens of {first['calib']}; perplexity of the source "
            f"{first['weights']['perplexity_original']:.2f}. The machine was shared.\n\n"
            "| form | bits per weight, all counted | KL of the weights | 99 % | same top token | perplexity "
            "| KL as served | minutes of processor time |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n"
        )
        order = list(FORMS)
        for line in sorted(rows, key=lambda line: order.index(line["form"])):
            w, s = line["weights"], line["served"]
            cells = (
                line["form"],
                f"{line['bits']:.2f}",
                f"{w['kl_mean']:.4f} ± {w['kl_mean_se']:.4f}",
                f"{w['kl_p99']:.3f}",
                f"{w['top1_agreement']:.2%}",
                f"{w['perplexity']:.2f}",
                f"{s['kl_mean']:.4f}",
                f"{line['cpu_minutes']:.2f}",
            )
            parts.append(f"| {' | '.join(cells)} |\n")
        parts.append("\n")
    RESULTS.with_suffix(".md").write_text("".join(parts).rstrip("\n") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("source", type=Path)
    runs.add_argument("--calib", type=Path, required=True)
    runs.add_argument("--text", type=Path, required=True)
    runs.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
    runs.add_argument("--tokens", type=int, default=6144)
    runs.add_argument("--samples", type=int, default=32)
    commands.add_parser("write")
    given = parser.parse_args()
    if given.command == "write":
        write()
    else:
        run(given)


if __name__ == "__main__":
    main()
