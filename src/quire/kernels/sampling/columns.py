"""What the sampling ops know of a row: a record of numbers, laid out as csrc/cpu/sampling.h has it."""

from __future__ import annotations

import numpy as np

# Bits of the `features` column.
RANDOM = 1  # temperature > 0
TRUNCATED = 2  # top_k or top_p
MIN_P = 4
EDITED = 8  # bias, penalties or constraints
LOGPROBS = 16

COLUMNS = np.dtype(
    [
        ("features", np.int64),
        ("temperature", np.float32),
        ("top_k", np.int64),  # vocab_size: off
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.int64),
        ("sample_index", np.int64),
        ("position", np.int64),  # absolute position of the next token drawn
        ("num_logprobs", np.int64),
    ],
    align=True,
)
