"""`quire serve --check`: how far the model, as it will be served, is from its own weights in fp32.

It is measured before the engine loads its weights. Both forms of the model are in memory until then.
"""

from __future__ import annotations

import sys
from typing import Any

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire.errors import ConfigError
from quire_lab.eval.args import FP32, EvalArgs
from quire_lab.eval.run import evaluate

# What decides the logits of a model alone; the rest belongs to a server, or to its ranks.
MEASURED = (
    "model", "revision", "tokenizer", "load_format", "dtype", "quantize", "quantize_head", "kv_dtype", "device",
    "threads", "cpu_isa", "max_num_batched_tokens",
)  # fmt: skip


def check(engine: EngineArgs, text: str | None, max_kl: float | None) -> None:
    """Print the mean KL on the first tokens of ``text``.

    Raises:
        ConfigError: it is above ``max_kl``, or the text cannot be read, or there is none.
    """
    if text is None:
        raise ConfigError(
            "max_kl needs check: give --check FILE, a text on which the KL is measured", param="max_kl"
        )
    alone = EngineArgs(**{name: getattr(engine, name) for name in MEASURED})
    args = EvalArgs(text=text, against=FP32, context=512, stride=512, limit_tokens=2048)
    result = evaluate(alone, args, detect_device(engine.device), WallClock())
    print(f"check    {_said(result, text)}", file=sys.stderr, flush=True)
    if max_kl is not None and not (result["kl_mean"] or 0.0) <= max_kl:
        raise ConfigError(
            f"the mean KL from fp32 is {result['kl_mean']:.4g} on {text}, and max_kl = {max_kl:g}: nothing is served; "
            "take more bits (--quantize int8, --kv-dtype int8), or allow more",
            param="max_kl",
        )


def _said(result: dict[str, Any], text: str) -> str:
    return (
        f"mean KL from fp32 {result['kl_mean']:.4f}, 99 % {result['kl_p99']:.3f}, same top token "
        f"{result['top1_agreement']:.1%}, perplexity {result['perplexity']:.2f} "
        f"({result['perplexity_original']:.2f} in fp32): {result['num_positions']:,} tokens of {text}"
    )
