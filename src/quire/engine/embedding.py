"""From a pooled vector to the embedding that clients get: cut to fewer dimensions, and of length one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.request import SamplingParams

# What a request with a `Pooling` is sampled with: nothing is drawn.
NOTHING_DRAWN = SamplingParams(temperature=0.0, seed=0, max_tokens=1, ignore_eos=True)


def embedding(
    pooled: Sequence[float], *, dimensions: int | None = None, normalize: bool = True
) -> NDArray[np.float32]:
    """Return the first ``dimensions`` numbers of ``pooled`` (None: all), scaled to Euclidean length one.

    Cutting before scaling is what models of Matryoshka embeddings are trained for (Kusupati et al. 2022).

    Raises:
        RequestError: more ``dimensions`` than there are.
    """
    if dimensions is not None and not 1 <= dimensions <= len(pooled):
        raise RequestError(
            f"dimensions = {dimensions} is not allowed: the vectors of this model have {len(pooled)}; ask for "
            f"1…{len(pooled)}.",
            param="dimensions",
        )
    vector = np.array(pooled[:dimensions], np.float64)
    length = float(np.sqrt(np.square(vector).sum()))
    if normalize and length > 0.0:
        vector /= length
    return vector.astype(np.float32)
