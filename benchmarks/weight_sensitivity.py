"""Which matrices lose most in 4 bits: the mean KL of a model whose linears are rounded as `--quantize` rounds them.

    python -m benchmarks.noisy_source FILE.gguf SOURCE
    python -m benchmarks.weight_sensitivity SOURCE --text TEXT [--tokens 1536]

Weights alone are rounded, rotated as on a CPU, and multiplied in fp32 by transformers, so activations lose nothing. A
line per choice of formats: bits per weight of the linears, mean KL from the source in nats, and equal top tokens.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.kernels.rotation import rotate_weights
from quire.quant.rtn import quantize
from quire.quant.stored import dequantize
from quire.weight_format import ROTATIONS, WeightFormat

WINDOW = 256
PARTS = ("q", "k", "v", "o", "gate", "up", "down")
Rule = Callable[[int, str], bool]  # layer, part → whether it has 4 bits


class Rounded:
    """A model of transformers whose linears are rounded again for each choice."""

    def __init__(self, folder: Path, text: str, num_tokens: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(text[: 8 * num_tokens], add_special_tokens=False)["input_ids"][:num_tokens]
        first = [tokenizer.bos_token_id] if self.model.config.model_type.startswith("gemma") else []
        step = WINDOW - len(first)
        self.windows = [[*first, *ids[i : i + step]] for i in range(0, len(ids) - step + 1, step)]
        self.linears = {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and "lm_head" not in name
        }
        self.plain = {name: module.weight.data for name, module in self.linears.items()}
        self.original = list(self.log_probs())

    @property
    def num_layers(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @torch.inference_mode()
    def log_probs(self) -> Iterator[Tensor]:
        """Yield those of each window but for its first and last token, fp32 ``[num_tokens, vocab_size]``."""
        for window in self.windows:
            logits: Tensor = self.model(torch.tensor([window])).logits
            yield logits[0, 1:-1].float().log_softmax(-1)

    def measure(self, name: str, has_4_bits: Rule) -> None:
        """Print the line of one choice."""
        num_bits = num_weights = 0
        for place, module in self.linears.items():
            layer, part = re.findall(r"layers\.(\d+)\..*?([a-z]+)(?:_proj)?$", place)[0]
            weight = self.plain[place]
            block = next((size for size in ROTATIONS if weight.shape[1] % size == 0), None)
            held = WeightFormat(
                *(("int4", 16) if has_4_bits(int(layer), part) else ("int8",)), rotation=block
            )
            rounded = dequantize(quantize(weight, held))
            module.weight.data = rounded if block is None else rotate_weights(rounded, block)
            num_bits += held.num_bytes(*weight.shape, 2) * 8
            num_weights += weight.numel()
        kl = agreed = count = 0.0
        for one, other in zip(self.original, self.log_probs(), strict=True):
            kl += float((one.exp() * (one - other)).sum())
            agreed += float((one.argmax(-1) == other.argmax(-1)).sum())
            count += len(one)
        print(
            f"{name:24} {num_bits / num_weights:.2f} bits  KL {kl / count:.4f}  top {agreed / count:.1%}",
            flush=True,
        )


def in_wide_layer(layer: int, num_layers: int) -> bool:
    """Whether `quire.weight_plan` keeps down of this layer in 8 bits."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def main() -> None:
    """Measure all choices."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1536)
    asked = parser.parse_args()
    rounded = Rounded(asked.source, asked.text.read_text(), asked.tokens)
    rounded.measure("int8", lambda layer, part: False)
    rounded.measure("int4-g16", lambda layer, part: True)
    rounded.measure("v in int8", lambda layer, part: part != "v")
    wide = {layer for layer in range(rounded.num_layers) if in_wide_layer(layer, rounded.num_layers)}
    rounded.measure(
        "v, down of half the layers",
        lambda layer, part: part != "v" and not (part == "down" and layer in wide),
    )
    rounded.measure("int4", lambda layer, part: part not in "kv" and not (part == "down" and layer in wide))
    rounded.measure("v and down in int8", lambda layer, part: part not in ("v", "down"))
    for chosen in PARTS:
        rounded.measure(f"only {chosen} in 4 bits", lambda layer, part, chosen=chosen: part == chosen)


if __name__ == "__main__":
    main()
