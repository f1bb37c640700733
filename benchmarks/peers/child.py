"""A peer in a process of its own, which answers lines of JSON on stdin: logits, or seconds of processor time.

A line is ``{"want": "logits" | "prompt" | "steps", "ids": [token, …]}``. The answer is a line with ``seconds`` and the
``bytes`` of the model's tensors. For logits it also has ``rows`` and ``vocab_size``, and the logits of all tokens but
the last follow, as fp32 ``[rows, vocab_size]``. A prompt is one call with the logits of its last token. Steps are one
call per token, each with its logits.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol

import numpy as np


class Peer(Protocol):
    """A model with one sequence. ``num_bytes``: of its tensors."""

    num_bytes: int

    def reset(self) -> None:
        """Forget the sequence."""

    def feed(self, ids: list[int], *, all_logits: bool) -> Any:
        """Append tokens; return fp32 logits ``[len(ids), vocab_size]``, or the last token's ``[1, vocab_size]``."""


def answer_lines(peer: Peer) -> None:
    """Answer until stdin ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        ids, want = asked["ids"], asked["want"]
        peer.reset()
        start_s = time.process_time()
        if want == "steps":
            for token in ids:
                peer.feed([token], all_logits=False)
        else:
            logits = peer.feed(ids, all_logits=want == "logits")
        head = {"seconds": time.process_time() - start_s, "bytes": peer.num_bytes}
        if want == "logits":
            rows = np.ascontiguousarray(logits[: len(ids) - 1], np.float32)
            head |= {"rows": rows.shape[0], "vocab_size": rows.shape[1]}
        sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
        if want == "logits":
            sys.stdout.buffer.write(rows.tobytes())
        sys.stdout.buffer.flush()
