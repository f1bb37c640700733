"""What llama.cpp's and TGI's forms have in common: one prompt and one answer, names of limits, plain events.

They are thin: the body becomes one of ``/v1/completions``, which checks it; the answer is written as those servers do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.api.job import Job
from quire.errors import RequestError

_encode = msgspec.json.Encoder().encode
LIMITS = ("n_predict", "max_tokens", "num_predict", "max_new_tokens")


def single_answer(job: Job, param: str) -> Job:
    if len(job.prompts) * job.sampling.n != 1:
        raise RequestError(
            f"{param}: one prompt with one answer (n = 1) is allowed here; /v1/completions takes several.",
            param=param,
        )
    return job


def plain_event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
