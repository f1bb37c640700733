"""What each method of `quire quantize` loses and costs: writes benchmarks/results/quantize.{jsonl,md}.

    python -m benchmarks.noisy_source FILE.gguf SOURCE
    python -m benchmarks.quantize run SOURCE --calib wiki.train.raw --text wiki.valid.raw [--forms gptq-int4 …]
    python -m benchmarks.quantize write

`imatrix` writes importances of the calibration text in llama.cpp's older form, with which llama.cpp itself quantizes
(benchmarks/peers/llamacpp_quantize.py). `run` adds a line per form to the JSONL file, and `file` that of a file that is
there already, each in the place of one of the same source and form; `write` makes the table. KL is from the 16-bit
source in fp32, over the full vocabulary, in windows of 512 tokens side by side: with the rounded weights in fp32, and
as the engine serves the file. Minutes are processor time of all threads, since the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
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
from quire.models.checkpoint import describe
from quire_lab.eval.args import EvalArgs
from quire_lab.eval.inputs import read_inputs
from quire_lab.eval.model import LoadedModel, find_model
from quire_lab.eval.run import Pair, Work, figures, planned_work
from quire_lab.quantize.args import CALIBRATED, QuantizeArgs
from quire_lab.quantize.calibrated import Calibration
from quire_lab.quantize.folder import OutFolder
from quire_lab.quantize.gguf.metadata import architecture, model_keys
from quire_lab.quantize.gguf.tensors import targets
from quire_lab.quantize.run import quantize
from quire_lab.quantize.source import read_source
from quire_lab.quantize.work import LayerWork

RESULTS = Path(__file__).resolve().parent / "results" / "quantize.jsonl"
CONTEXT = 512
FORMS: dict[str, dict[str, Any]] = {
    "rtn-int4": {"method": "rtn"},
    "rtn-int4-zeros": {"method": "rtn", "symmetric": False},
    "rtn-int4-rotated": {"method": "rtn", "rotate": True},
    "rtn-int3": {"method": "rtn", "bits": 3},
    "rtn-int2": {"method": "rtn", "bits": 2},
    "awq-int4": {"method": "awq"},
    "gptq-int4": {"method": "gptq"},
    "gptq-int4-rotated": {"method": "gptq", "rotate": True},
    "gptq-int3": {"method": "gptq", "bits": 3},
    "gptq-int2": {"method": "gptq", "bits": 2},
    "gptq-int4-zeros": {"method": "gptq", "symmetric": False},
    "rtn-int8": {"method": "rtn", "bits": 8},
    "rtn-w8a8": {"method": "rtn", "activations": True},
    "smoothquant-w8a8": {"method": "smoothquant"},
    "fp8": {"method": "fp8"},
    "gguf-q4_k_m-rtn": {"method": "rtn", "format": "gguf"},
    "gguf-q4_k_m-imatrix": {"method": "imatrix", "format": "gguf"},
    "gguf-q4_k_m-gptq": {"method": "gptq", "format": "gguf"},
}
PEER = "llama.cpp Q4_K_M, imatrix"
HEADER = """# What `quire quantize` loses

    python -m benchmarks.noisy_source FILE.gguf SOURCE
    python -m benchmarks.quantize run SOURCE --calib CALIB --text TEXT
    python -m benchmarks.quantize write

What this does not show yet: llama.cpp's Q4_K_M with an importance matrix, other makers' files, and the models beside
SmolLM2. Rotation takes outliers away, which Quill does not have. AWQ closes a quarter of what `rtn` loses there.

The rows of SmolLM2 were typed in from what `quire quantize` and `quire eval` printed, to three digits. Their KL is of
an earlier version of the same search in torch (a newer one gave `rtn` 0.499 on 2,044 positions, in 2 seconds of
processor time, which is the figure in the table); the minutes of `gptq` are of that earlier version too.

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
    work = planned_work(args, found, read_inputs(Path(args.text)), CONTEXT, CONTEXT)
    return Remembered(LoadedModel(found, work.max_tokens, WallClock())), work


def kl(made: Path, base: Remembered, work: Work, *, expand: bool) -> dict[str, Any]:
    engine = EngineArgs(model=str(made), packed_cache="off", dtype="float32" if expand else "auto")
    model = LoadedModel(find_model(engine, detect_device(), expand=expand), work.max_tokens, WallClock())
    found = figures(Pair(model, base), work)  # type: ignore[arg-type]
    model.close()
    keys = ("kl_mean", "kl_mean_se", "kl_p99", "top1_agreement", "perplexity", "perplexity_original")
    return {key: found[key] for key in keys} | {"num_positions": found["num_positions"]}


def run(given: argparse.Namespace) -> None:
    base, work = original(given.source, eval_args(given))
    for form in given.forms:
        folder = Path(tempfile.mkdtemp(prefix="quire-quantize-"))
        calib = str(given.calib) if FORMS[form]["method"] in CALIBRATED else None
        asked = replace(
            QuantizeArgs(calib=calib, calib_samples=given.samples, out=str(folder / "made")), **FORMS[form]
        )  # fmt: skip
        start_s = time.process_time()
        report = quantize(str(given.source), asked, WallClock())
        minutes = (time.process_time() - start_s) / 60
        add(given, form, folder / "made", base, work, cpu_minutes=minutes, num_bytes=report["bytes"])
        shutil.rmtree(folder)


def eval_args(given: argparse.Namespace) -> EvalArgs:
    return EvalArgs(text=str(given.text), context=CONTEXT, stride=CONTEXT, limit_tokens=given.tokens)


def add(
    given: argparse.Namespace, form: str, made: Path, base: Remembered, work: Work, *, cpu_minutes: float | None,
    num_bytes: int,
) -> None:  # fmt: skip
    """Measure ``made``, and put its line in the place of an older one."""
    line = {
        "source": given.source.name, "form": form, "date": date.today().isoformat(),
        "machine": detect_device().name, "calib": given.calib.name, "text": given.text.name,
        "samples": given.samples, "cpu_minutes": cpu_minutes,
        "bits": 8 * num_bytes / describe(given.source).spec.num_params, "bytes": num_bytes,
        "weights": kl(made, base, work, expand=True), "served": kl(made, base, work, expand=False),
    }  # fmt: skip
    known = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    known = [each for each in known if (each["source"], each["form"]) != (line["source"], form)]
    RESULTS.write_text("".join(json.dumps(each) + "\n" for each in [*known, line]))
    print(json.dumps(line), flush=True)


def measure(given: argparse.Namespace) -> None:
    base, work = original(given.source, eval_args(given))
    size = given.file.stat().st_size
    add(given, given.form, given.file, base, work, cpu_minutes=given.cpu_minutes, num_bytes=size)


def imatrix(given: argparse.Namespace) -> None:
    """Write the mean square of the inputs of each matrix, which the text has in the model as it is."""
    source, device = read_source(given.source), detect_device()
    args = QuantizeArgs(method="imatrix", calib=str(given.calib), calib_samples=given.samples)
    spec = source.checkpoint.spec
    keys = model_keys(spec, architecture(spec, str(given.source)), "")
    names = {name: target.name for target in targets(source, keys) for name in target.stored}
    calibration, entries = Calibration(source, args, device), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = OutFolder(Path(scratch) / "out", {}, source.num_layers + 1)
        for layer in range(source.num_layers):
            stats = calibration.stats(layer)
            for matrix in source.matrices:
                if matrix.layer == layer:
                    values = stats[matrix.name].gram.diagonal().tolist()
                    name = names[matrix.tensor].encode()
                    head = struct.pack(f"<i{len(name)}sii", len(name), name, 1, len(values))
                    entries.append(head + struct.pack(f"<{len(values)}f", *values))
            calibration.hand_on(folder, layer, LayerWork(spec.layers[layer], (), {}, {}, {}, {}), {})
    given.out.write_bytes(struct.pack("<i", len(entries)) + b"".join(entries) + struct.pack("<i", 1))


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
        order = [*FORMS, PEER]
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
                "" if line["cpu_minutes"] is None else f"{line['cpu_minutes']:.2f}",
            )
            parts.append(f"| {' | '.join(cells)} |\n")
        parts.append("\n")
    RESULTS.with_suffix(".md").write_text("".join(parts).rstrip("\n") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, task in (("run", run), ("file", measure), ("imatrix", imatrix)):
        runs = commands.add_parser(name)
        runs.set_defaults(task=task)
        runs.add_argument("source", type=Path)
        runs.add_argument("--calib", type=Path, required=True)
        runs.add_argument("--samples", type=int, default=32)
        if name == "imatrix":
            runs.add_argument("--out", type=Path, required=True)
            continue
        runs.add_argument("--text", type=Path, required=True)
        runs.add_argument("--tokens", type=int, default=6144)
        if name == "run":
            runs.add_argument("--forms", nargs="*", default=list(FORMS), choices=list(FORMS))
        else:
            runs.add_argument("file", type=Path)
            runs.add_argument("--form", default=PEER)
            runs.add_argument("--cpu-minutes", type=float)
    commands.add_parser("write")
    given = parser.parse_args()
    if given.command == "write":
        write()
    else:
        given.task(given)


if __name__ == "__main__":
    main()
