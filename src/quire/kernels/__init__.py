"""The ops that a model is made of. One folder an op: a contract, a reference beside it, faster versions later.

Importing the package fills the table of `registry`.
"""

from quire.kernels import activation, attention, embedding, kvcopy, linear, moe, norm, rope, sampling

__all__ = ["activation", "attention", "embedding", "kvcopy", "linear", "moe", "norm", "rope", "sampling"]
