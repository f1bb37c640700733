"""The ops that a model is made of. One folder per op: the contract, its reference, and faster versions beside it.

Importing the package fills the table of `registry`.
"""

from quire.kernels import attention, linear, lora, moe, norm, pointwise, rope, sampling

__all__ = ["attention", "linear", "lora", "moe", "norm", "pointwise", "rope", "sampling"]
