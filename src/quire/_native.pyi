"""Types of the native extension (csrc/bindings.cpp). Addresses are `Tensor.data_ptr()`; callers check shapes."""

def cpu_features() -> dict[str, bool]: ...
def best_isa() -> str: ...
def has_isa(isa: str) -> bool: ...
def packed_elements(type: str, n: int, k: int) -> int: ...
def pack(num_threads: int, type: str, w: int, count: int, k: int, first: int, packed: int) -> None: ...
def linear(
    num_threads: int,
    isa: str,
    type: str,
    x: int,
    x_stride: int,
    packed: int,
    bias: int,
    y: int,
    y_stride: int,
    y_type: str,
    rows: int,
    n: int,
    k: int,
) -> None: ...
