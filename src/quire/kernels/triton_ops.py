"""Importing this registers the Triton versions of the ops. Only engines of a GPU import it: it takes a second."""

from quire.kernels import triton_interpreter

if triton_interpreter.interpreting():
    triton_interpreter.repair()

from quire.kernels.attention import triton as attention
from quire.kernels.linear import triton as linear
from quire.kernels.lora import triton as lora
from quire.kernels.moe import triton as moe
from quire.kernels.norm import triton as norm
from quire.kernels.pointwise import triton as pointwise
from quire.kernels.rope import triton as rope
from quire.kernels.sampling import triton as sampling

__all__ = ["attention", "linear", "lora", "moe", "norm", "pointwise", "rope", "sampling"]
