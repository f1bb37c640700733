"""all-MiniLM-L6-v2 in Quire next to sentence-transformers and onnxruntime's int8: how near its vectors are, how fast.

The texts are the first 1,000 sentences of docs/. Each engine is a process of its own that loads, waits for its turn,
and embeds the same texts in batches of 32; turns alternate, and the table has the medians. Peers run in an
environment with torch, sentence-transformers, onnx and onnxruntime:

    .venv/bin/python -m benchmarks.encoders --peer-python /path/to/venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
MODEL = Path("~/.cache/quire/real-models/all-MiniLM-L6-v2").expanduser()
PEERS = ("sentence-transformers", "onnxruntime-int8")
BATCH = 32
Encode = Callable[[Sequence[str]], Any]


def sentences() -> list[str]:
    """Return the first 1,000 sentences of the docs."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        found += [" ".join(part.split()) for part in re.split(r"\n\s*\n|(?<=[.:]) ", page.read_text())]
    return [text for text in found if len(text) > 20][:1000]


def quire_engine(options: dict[str, Any]) -> Encode:
    """Return `LLM.embed`, whose scheduler makes the batches."""
    from quire import LLM

    llm = LLM(str(MODEL), max_num_seqs=BATCH, max_num_batched_tokens=8192, max_model_len=256, **options)
    tokenizer = llm.get_tokenizer()

    def encode(texts: Sequence[str]) -> Any:
        # Cut as sentence-transformers does: 256 tokens with both marks.
        ids = [tokenizer.encode(text) for text in texts]
        cut = [each if len(each) <= 256 else [*each[:255], each[-1]] for each in ids]
        outputs = llm.embed([{"prompt_token_ids": each} for each in cut], use_tqdm=False)
        return np.array([output.outputs.embedding for output in outputs], np.float32)

    return encode


def sentence_transformers_engine(threads: int) -> Encode:
    """Return sentence-transformers in fp32."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(MODEL), device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=BATCH, show_progress_bar=False)


def onnxruntime_engine(threads: int) -> Encode:
    """Return onnxruntime with weights in int8 (dynamic quantization), batches sorted by length as the others."""
    import onnxruntime
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from tokenizers import Tokenizer
    from transformers import AutoModel

    class Rows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = AutoModel.from_pretrained(MODEL, attn_implementation="eager").eval()

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    folder = Path(tempfile.mkdtemp(prefix="quire-onnx-"))
    example = torch.ones(2, 16, dtype=torch.int64)
    axes = {name: {0: "batch", 1: "tokens"} for name in ("input_ids", "attention_mask", "rows")}
    torch.onnx.export(
        Rows(), (example, example), str(folder / "fp32.onnx"), input_names=["input_ids", "attention_mask"],
        output_names=["rows"], dynamic_axes=axes, opset_version=17, dynamo=False,
    )  # fmt: skip
    quantize_dynamic(str(folder / "fp32.onnx"), str(folder / "int8.onnx"), weight_type=QuantType.QInt8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(
        str(folder / "int8.onnx"), options, providers=["CPUExecutionProvider"]
    )
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def encode(texts: Sequence[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        vectors = np.zeros((len(texts), 384), np.float32)
        for start in range(0, len(order), BATCH):
            some = order[start : start + BATCH]
            encoded = tokenizer.encode_batch([texts[i] for i in some])
            ids = np.array([each.ids for each in encoded], np.int64)
            mask = np.array([each.attention_mask for each in encoded], np.int64)
            rows = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
            mean = (rows * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            vectors[some] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return vectors

    return encode


def serve_turns(name: str, options: dict[str, Any], threads: int) -> None:
    """Embed the texts of the file that each line of stdin names, write the vectors beside it, print the seconds."""
    if name.startswith("quire"):
        encode = quire_engine({**options, "threads": threads})
    elif name == "sentence-transformers":
        encode = sentence_transformers_engine(threads)
    else:
        encode = onnxruntime_engine(threads)
    encode(["warm up"] * BATCH)
    print("ready", flush=True)
    for line in sys.stdin:
        texts = json.loads(Path(line.strip()).read_text())
        began_s = time.perf_counter()
        vectors = encode(texts)
        seconds = time.perf_counter() - began_s
        np.save(f"{line.strip()}.{name}.npy", np.asarray(vectors, np.float32))
        print(f"seconds {seconds}", flush=True)


class Engine:
    """A process that embeds when it is its turn."""

    def __init__(self, name: str, python: str, options: dict[str, Any], threads: int) -> None:
        self.name, self.seconds = name, list[float]()
        command = [
            python,
            str(Path(__file__)),
            "--serve",
            name,
            "--options",
            json.dumps(options),
            "--threads",
            str(threads),
        ]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )
        self._line("ready")

    def _line(self, wanted: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(wanted):
                return line.removeprefix(wanted).strip()
        raise SystemExit(f"{self.name} ended")

    def turn(self, file: Path) -> tuple[float, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{file}\n")
        self._process.stdin.flush()
        seconds = float(self._line("seconds"))
        return seconds, np.load(f"{file}.{self.name}.npy")

    def close(self) -> None:
        self._process.communicate("")


def main() -> None:
    """Print two tables: cosines over all texts, and texts per second."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=512, help="texts of a timed turn")
    parser.add_argument("--serve")
    parser.add_argument("--options", default="{}")
    asked = parser.parse_args()
    if asked.serve:
        serve_turns(asked.serve, json.loads(asked.options), asked.threads)
        return
    settings: dict[str, dict[str, Any]] = {
        "quire-float32": {}, "quire-bfloat16": {"dtype": "bfloat16"},
        "quire-int8": {"dtype": "bfloat16", "quantize": "int8"},
    }  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="quire-encoders-"))
    whole, timed = folder / "all.json", folder / "timed.json"
    whole.write_text(json.dumps(sentences()))
    timed.write_text(json.dumps(sentences()[: asked.texts]))
    engines = [Engine(name, asked.peer_python, {}, asked.threads) for name in PEERS]
    engines += [Engine(name, sys.executable, options, asked.threads) for name, options in settings.items()]
    vectors = {engine.name: engine.turn(whole)[1] for engine in engines}
    for _ in range(asked.rounds):
        for engine in engines:
            engine.seconds.append(engine.turn(timed)[0])
    base = vectors["sentence-transformers"]
    print("| engine | least cosine | mean cosine | texts/s, median | of sentence-transformers |")
    print("|---|---|---|---|---|")
    slow = statistics.median(engines[0].seconds)
    for engine in engines:
        near = (vectors[engine.name] * base).sum(1)
        seconds = statistics.median(engine.seconds)
        speed = f"{asked.texts / seconds:.0f} | {slow / seconds:.2f}"
        print(f"| {engine.name} | {near.min():.6f} | {near.mean():.6f} | {speed} |", flush=True)
        engine.close()


if __name__ == "__main__":
    main()
