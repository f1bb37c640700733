"""Which noise belongs to which draw. The mapping to Philox words is `quire.kernels.sampling`'s contract.

Noise is a function of (seed, sample_index, position, token id, purpose) and of nothing else: not of the batch, the
step, the chunk or the number of draws made before. So a sequence that is preempted, restarted or verified against
drafts meets the same noise at the same position again.
"""

from __future__ import annotations

from enum import IntEnum


class Purpose(IntEnum):
    """The counter word that keeps draws of different meaning at one position independent."""

    DRAW = 0  # the token itself
    ACCEPT = 1  # rejection sampling of drafts (Leviathan et al. 2023)
