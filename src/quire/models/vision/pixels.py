"""What the encoders have in common at their entry: pixels as numbers, and patches as rows of a linear."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from quire.layers.weights import WeightLoader
from quire.quant.stored import Weight
from quire.vision_spec import VisionSpec


def pixel_values(spec: VisionSpec) -> np.ndarray:
    """Return what each value of a pixel becomes, per channel: fp32 ``[3, 256]``."""
    how = spec.preprocessing
    assert how is not None
    rescaled = (np.arange(256, dtype=np.float64) * how.rescale).astype(np.float32)
    mean, std = np.array(how.mean, np.float32), np.array(how.std, np.float32)
    return np.asarray((rescaled[None, :] - mean[:, None]) / std[:, None])


def flattened(load: WeightLoader) -> WeightLoader:
    """Return a loader for a convolution whose stride is its size: ``[hidden, 3, …, patch, patch]``."""

    def load_flat(weight: Weight) -> None:
        assert isinstance(weight, Tensor)
        load(weight.flatten(1))

    return load_flat
