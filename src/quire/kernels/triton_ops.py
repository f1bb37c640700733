"""Importing this registers the Triton versions of the ops. Engines of a GPU do, no others: it takes a second."""

from quire.kernels import triton_interpreter

if triton_interpreter.interpreting():
    triton_interpreter.repair()

from quire.kernels.activation import triton as activation
from quire.kernels.attention import triton as attention
from quire.kernels.kvcopy import triton as kvcopy
from quire.kernels.linear import fp8_triton, quantized_triton
from quire.kernels.linear import triton as linear
from quire.kernels.lora import triton as lora
from quire.kernels.moe import triton as moe
from quire.kernels.norm import triton as norm
from quire.kernels.rope import triton as rope
from quire.kernels.sampling import triton as sampling

__all__ = [
    "activation", "attention", "fp8_triton", "kvcopy", "linear", "lora", "moe", "norm", "quantized_triton", "rope",
    "sampling",
]  # fmt: skip
