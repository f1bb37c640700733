"""`quire doctor`: what this machine has, which kernels will be used, and what to install."""

from __future__ import annotations

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quire import __version__
from quire.cores import numa_nodes, usable_cpus, withheld_cores
from quire.device import (
    FP8_CAPABILITY,
    cpu_features,
    cpu_flags,
    detect_device,
    find_gpu,
    gpu_problem,
    is_built,
    slow_kernels,
    unused_levels,
)
from quire.executor.rank_processes import cores_of
from quire.extras import EXTRAS, absent_extras, install_command
from quire.models.packed_file import entries, packed_folder
from quire.parallel.segment import segment_bytes
from quire.parallel.topology import Topology

NEEDED = ("torch", "numpy", "tokenizers", "huggingface_hub", "jinja2", "tqdm")
SERVING = (
    "msgspec", "pyzmq", "starlette", "pydantic", "python-multipart", "uvicorn", "uvloop", "httptools", "websockets",
    "prometheus-client", "setproctitle", "typer", "rich", "prompt_toolkit",
)  # fmt: skip
OPTIONAL = {"llguidance": "structured outputs", "aiohttp": "quire bench serve, quire profile"}


def packages() -> list[tuple[str, str, str]]:
    """Return (package, version or "missing", what it is for)."""
    rows = []
    for names, purpose in ((NEEDED, "needed"), (SERVING, "needed by quire serve")):
        rows += [(name, _version(name), purpose) for name in names]
    return rows + [(name, _version(name), purpose) for name, purpose in OPTIONAL.items()]


def absent() -> list[tuple[str, str, str]]:
    """Return (extra, what it would bring, the command that installs it) of each extra that is not installed."""
    return [(name, EXTRAS[name].brings, install_command(name)) for name in absent_extras()]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def advice() -> list[str]:
    """Return one sentence per improvement that the user could make."""
    device = detect_device()
    slow = slow_kernels(device, device.isa)
    sentences = [] if slow is None else [slow]
    missing = [
        name
        for name, found_version, purpose in packages()
        if found_version == "missing" and "needed" in purpose
    ]
    if missing:
        sentences.append(f"Install {', '.join(missing)}.")
    if device.memory_available_bytes < 2 * 2**30:
        sentences.append("Less than 2 GiB of memory is available: choose a small model, or free some memory.")
    return sentences


def reasons() -> list[str]:
    """Return why no faster level of kernels is used, and why not all cores are."""
    device = detect_device()
    levels = unused_levels(cpu_features(), device.isa, is_built, cpu_flags()) if device.native else []
    cores = withheld_cores()
    return levels + ([] if cores is None else [cores])


def kernels() -> str:
    """Return which kernels a CPU engine will use, and why."""
    device = detect_device()
    if not device.native:
        return "torch reference, exact by fixed tiles (the native extension is not built)"
    return f"native ({device.isa}), exact"


def gpu() -> str:
    """Return the GPU and what it supports, or why no GPU is used and what is used instead."""
    device = find_gpu()
    problem = device if isinstance(device, str) else gpu_problem(device)
    if problem is not None or isinstance(device, str):
        return f"{problem} The CPU is used."
    free = f"{device.memory_available_bytes / 2**30:.1f} of {device.memory_total_bytes / 2**30:.1f} GiB free"
    capability = ".".join(map(str, device.capability))
    fp8 = (
        "; fp8 weights and KV cache"
        if device.capability >= FP8_CAPABILITY
        else "; no fp8 weights or KV cache (they need 8.9), int8 takes the same bytes"
    )
    missing = "" if _version("triton") != "missing" else "; Triton is missing: install torch with CUDA"
    return f"{device.name}, compute capability {capability}, {free}: used with --device auto{fp8}{missing}"


def packed_weights() -> str:
    """Return where packed weights are kept, and how much there is."""
    try:
        folder = packed_folder()
    except OSError as error:
        return f"none: {error}"
    packed = entries(folder)
    size = sum(entry.num_bytes for entry in packed) / 2**30
    return f"{len(packed)} file{'s' * (len(packed) != 1)}, {size:.1f} GiB in {folder} (--packed-cache)"


def ranks(tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Print where the ranks of a server of this size would run, and the shared memory that they need.

    Raises:
        ConfigError: a size is below 1.
    """
    topology = Topology(tp=tensor_parallel_size, pp=pipeline_parallel_size)
    nodes, world = numa_nodes(), topology.world_size
    threads = max(1, len(usable_cpus()) // world)
    table = Table("rank", "stage", "cores", "memory node", "threads", box=None, pad_edge=False)
    for rank, cores in enumerate(cores_of(world, threads)):
        at = [str(number) for number, node in enumerate(nodes) if node & set(cores)]
        table.add_row(
            str(rank), str(topology.coordinates(rank).pp), " ".join(map(str, cores)) or "not pinned",
            " ".join(at) or "any", str(threads),
        )  # fmt: skip
    console = Console()
    console.print(table)
    needed = segment_bytes(topology) if world > pipeline_parallel_size else 0
    free = shutil.disk_usage("/dev/shm").free
    console.print(
        f"\n• /dev/shm: {needed / 2**20:.1f} MiB needed, {free / 2**20:.1f} MiB free", highlight=False
    )
    if needed > free:
        console.print("• Free some of it, or mount it larger (docker run --shm-size).")
    if world > len(usable_cpus()):
        console.print(
            f"• {world} ranks share {len(usable_cpus())} cores: quire serve wants --threads 1 for that."
        )


def report() -> None:
    """Print the report."""
    console = Console()
    device = detect_device()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("Quire", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    table.add_row("CPU", f"{device.name}, {device.num_cores} cores for this process")
    features = [name for name, has in cpu_features().items() if has]
    table.add_row(
        "Instructions", f"{device.isa} ({', '.join(features) or 'unknown without the native extension'})"
    )
    total, available = device.memory_total_bytes / 2**30, device.memory_available_bytes / 2**30
    table.add_row("Memory", f"{total:.1f} GiB, {available:.1f} GiB available (cgroup limits counted)")
    table.add_row("Kernels", kernels())
    table.add_row("GPU", gpu())
    table.add_row("Packed weights", packed_weights())
    console.print(table)
    console.print()
    rows = Table("package", "version", "for", box=None, pad_edge=False)
    for row in packages():
        rows.add_row(*row)
    console.print(rows)
    console.print()
    if missing := absent():
        extras = Table("absent extra", "would bring", "by", box=None, pad_edge=False)
        for row in missing:
            extras.add_row(*(escape(cell) for cell in row))
        console.print(extras)
        console.print()
    for sentence in reasons():
        console.print(f"• {sentence}")
    for sentence in advice() or ["Nothing to do: everything that Quire needs is installed."]:
        console.print(f"• {sentence}")
