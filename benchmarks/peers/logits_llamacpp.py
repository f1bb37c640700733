"""llama.cpp's logits of whole windows, for `benchmarks.fidelity`; runs where llama-cpp-python is installed.

    python logits_llamacpp.py FILE.gguf CONTEXT

Each line of stdin is a JSON list of token ids. The answer on stdout is a line of JSON with ``rows``, ``vocab_size``,
the ``seconds`` of processor time and the ``bytes`` of the model's tensors, and then the logits of all tokens but the
last, as fp32 ``[rows, vocab_size]``.
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp
import numpy as np


def main() -> None:
    """Answer until stdin ends."""
    path, context = sys.argv[1], int(sys.argv[2])
    model = llama_cpp.Llama(
        path, n_ctx=context, n_batch=context, n_ubatch=context, n_threads=1, n_threads_batch=1, logits_all=True,
        verbose=False,
    )  # fmt: skip
    num_bytes = llama_cpp.llama_model_size(model.model)
    for line in sys.stdin:
        ids = json.loads(line)
        start_s = time.process_time()
        model.reset()
        model.eval(ids)
        seconds = time.process_time() - start_s
        logits = np.ascontiguousarray(model.scores[: len(ids) - 1], np.float32)
        head = {
            "rows": logits.shape[0],
            "vocab_size": logits.shape[1],
            "seconds": seconds,
            "bytes": num_bytes,
        }
        sys.stdout.buffer.write(json.dumps(head).encode() + b"\n" + logits.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
