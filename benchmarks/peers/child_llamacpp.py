"""llama.cpp for `benchmarks.fidelity`; runs where llama-cpp-python is installed. See `child`.

python child_llamacpp.py FILE.gguf CONTEXT
"""

from __future__ import annotations

import sys
from typing import Any

import llama_cpp
import numpy as np
from child import answer_lines


class LlamaCpp:
    """Two contexts of the same file: one that keeps the logits of all tokens, one that keeps the last token's."""

    def __init__(self, path: str, context: int) -> None:
        common: dict[str, Any] = {
            "n_ctx": context, "n_batch": context, "n_ubatch": context, "n_threads": 1, "n_threads_batch": 1,
            "verbose": False,
        }  # fmt: skip
        self._every = llama_cpp.Llama(path, logits_all=True, **common)
        self._last = llama_cpp.Llama(path, **common)
        self.num_bytes = llama_cpp.llama_model_size(self._last.model)

    def reset(self) -> None:
        """Forget the sequence."""
        self._every.reset()
        self._last.reset()

    def feed(self, ids: list[int], *, all_logits: bool) -> Any:
        """Append tokens; return their logits, or the last token's."""
        model = self._every if all_logits else self._last
        model.eval(ids)
        if all_logits:
            return model.scores[: model.n_tokens]
        pointer = llama_cpp.llama_get_logits_ith(model.ctx, -1)
        return np.ctypeslib.as_array(pointer, shape=(1, model.n_vocab()))


if __name__ == "__main__":
    answer_lines(LlamaCpp(sys.argv[1], int(sys.argv[2])))
