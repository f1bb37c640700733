"""The ops that a model is made of. One folder per op: the contract with its reference, and faster versions beside it.

Importing the package registers the native versions; `kernels.triton_ops` registers those of a GPU.
"""

import quire.kernels.attention.native
import quire.kernels.linear.native
import quire.kernels.lora.native
import quire.kernels.moe.native
import quire.kernels.norm.native
import quire.kernels.pointwise.native
import quire.kernels.rope.native
import quire.kernels.sampling.native  # noqa: F401
