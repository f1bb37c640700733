"""The ops that a model is made of. One folder per op: the contract with its reference, and faster versions beside it.

Importing the package registers the native versions; `kernels.triton_ops` registers those of a GPU.
"""

import quire.kernels.attention.native
import quire.kernels.attention.striped
import quire.kernels.linear.native
import quire.kernels.lora
import quire.kernels.moe
import quire.kernels.norm
import quire.kernels.pointwise
import quire.kernels.rope.native
import quire.kernels.sampling.native  # noqa: F401
