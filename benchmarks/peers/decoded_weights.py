"""The matrices that transformers decodes from a quantized checkpoint, beside those that Quire decodes.

    python benchmarks/peers/decoded_weights.py FOLDER

Run it in an environment that has transformers, compressed-tensors and Quire. Each matrix that Quire reads quantized is
compared number for number; the exit status is 1 where one differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from quire.models.checkpoint import describe, stored_sources
from quire.models.stored_weights import open_quantized
from quire.parallel.shard import Cut


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    checkpoint = describe(folder)
    stored, sources = stored_sources(checkpoint.path, checkpoint.spec)
    decodes = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=decodes)
    modules = dict(model.named_modules())
    different, count = [], 0
    for canonical, source in sources.items():
        if source.scheme is None:
            continue
        matrix = open_quantized(source, stored, Cut(canonical))
        module = modules[source.take.names[0].removesuffix(".weight")]
        theirs = module.weight.detach()
        if theirs.shape != matrix.shape:
            continue  # a part of a fused matrix
        count += 1
        ours = matrix.expand(torch.float32)
        if not torch.equal(ours, theirs.float()):
            largest = (ours - theirs.float()).abs().max().item()
            different.append(f"{canonical}: {largest:.3g} of {ours.abs().max().item():.3g}")
    print(f"{count - len(different)} of {count} matrices are equal number for number")
    print("\n".join(different))
    return 1 if different or not count else 0


if __name__ == "__main__":
    sys.exit(main())
