"""What quantization costs on text that the models were not trained on: `pytest tests/quant/test_quality.py -s`.

Q4_0 is made by the gguf package and run by our reader, with the same kernels: its linears are Q4_0 (F16 where a row is
no whole number of blocks, as llama.cpp has it) and its output matrix is Q8_0, which is more than llama.cpp's Q6_K.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from tests.models.tiny import model_config
from tests.parity.gguf_writer import write_gguf
from tests.quant.perplexity import Text, bits_per_byte, nats, perplexity, text_of

from quire.args import EngineArgs
from quire.errors import ModelLoadError
from quire.models.checkpoint import describe
from quire.models.hub import quill_path
from quire.models.loader import iter_weights

Q4_0, Q8_0, F16 = (gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0", "F16"))


def write_q4_0(folder: Path, target: Path) -> Path:
    """Write the model of a folder as a Q4_0 GGUF."""
    found = describe(folder)
    weights = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    plain = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}

    def type_of(name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType | None:
        if len(shape) == 1:
            return None
        if shape[-1] % 32:
            return F16
        return Q8_0 if name == "token_embd.weight" else Q4_0

    return write_gguf(target, "llama", found.spec, plain, type_of=type_of)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) for name in ("quill", "stories260K")])
def case(request: pytest.FixtureRequest, shared_data: Path) -> tuple[Path, Text]:
    if request.param == "quill":
        try:
            folder = quill_path("quill")
        except ModelLoadError as error:
            pytest.skip(str(error))
        path, bos, window = shared_data / "text" / "novels_valid.txt.gz", 0, 1023
    else:
        folder = shared_data / "models" / "stories260K" / "hf"
        path, bos, window = shared_data / "text" / "tinystories_sample.txt", 1, 511
    return folder, text_of(path, folder / "tokenizer.json", bos, window, 40)


def test_bits_per_byte(case: tuple[Path, Text], tmp_path: Path) -> None:
    folder, text = case
    q4_0 = write_q4_0(folder, tmp_path / "q4_0.gguf")
    engines = {
        "bf16": EngineArgs(model=str(folder), dtype="bfloat16"),
        "int8": EngineArgs(model=str(folder), dtype="bfloat16", quantize="int8"),
        "int4": EngineArgs(model=str(folder), dtype="bfloat16", quantize="int4"),
        "int4-g32": EngineArgs(model=str(folder), dtype="bfloat16", quantize="int4-g32"),
        "GGUF Q4_0": EngineArgs(model=str(q4_0), dtype="bfloat16"),
        "int4-g128": EngineArgs(model=str(folder), dtype="bfloat16", quantize="int4-g128"),
        "Q4_0 expanded": EngineArgs(model=str(q4_0), dtype="bfloat16", quantize="none"),
    }
    found = {name: nats(args, text) for name, args in engines.items()}
    print(f"\n{folder.name}: {len(text.windows)} windows, {text.num_tokens} tokens, {text.num_bytes} bytes")
    for name, total in found.items():
        share = perplexity(total, text) / perplexity(found["bf16"], text) - 1
        bits, each = bits_per_byte(total, text), perplexity(total, text)
        print(f"{name:14} {bits:.4f} bits per byte, perplexity {each:.3f} ({share:+.2%})")
    assert perplexity(found["int8"], text) <= 1.005 * perplexity(found["bf16"], text)
    assert max(found["int4"], found["int4-g32"]) <= found["GGUF Q4_0"]
