"""PagedAttention's block tables (arXiv:2309.06180) against contiguous reservations, for the same requests."""

from __future__ import annotations

from quire.errors import ConfigError
from quire_lab.learn.allocation import Run, contiguous, paged
from quire_lab.learn.picture import Axis, Cell, Fact, Facts, Grid, Line, Lines, Picture, Table
from quire_lab.learn.simulation import Simulation, number
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import parse_lengths

_WIDTH = 32  # cells of a row


def drawn_lengths(requests: int, prompt: int, output: int, max_len: int, seed: int) -> list[tuple[int, int]]:
    """Return log-normal (prompt, output) lengths that fit in ``max_len``."""
    made = Synthetic(
        requests,
        parse_lengths(f"lognormal:{prompt},0.8,{max_len}", "prompt"),
        parse_lengths(f"lognormal:{output},0.8,{max_len}", "output"),
    ).build(seed, None)
    lengths = []
    for r in made.requests:
        first = min(r.num_prompt_tokens, max_len - 2)
        lengths.append((first, max(2, min(r.num_output_tokens, max_len - first))))
    return lengths


def draw(
    requests: int,
    prompt: int,
    output: int,
    max_len: int,
    memory: int,
    block_size: int,
    step: float,
    seed: int,
) -> Picture:
    """Return both memories after the same share ``step`` of their steps, and the waste over all steps."""
    if memory < max_len:
        raise ConfigError(f"--memory {memory} must be at least --max-len {max_len}: one request must fit")
    lengths = drawn_lengths(requests, prompt, output, max_len, seed)
    pages, ranges = paged(lengths, memory, block_size, max_len), contiguous(lengths, memory, max_len)
    parts = (
        _grid("paged: one cell per block", _paged_cells(pages, memory, block_size, step)),
        _grid(
            "contiguous: the same places, reserved to the longest length",
            _range_cells(ranges, memory, block_size, step),
        ),
        _tables(pages, step),
        Lines(
            "",
            Axis("step"),
            Axis("requests running"),
            (_running("paged", pages), _running("contiguous", ranges)),
        ),
    )
    facts = (
        Fact("waste of contiguous reservations", ranges.waste * 100, "% of what is reserved"),
        Fact("waste of blocks", pages.waste * 100, "% of what is allocated"),
        Fact("requests at once, contiguous (mean)", ranges.mean_running),
        Fact("requests at once, paged (mean)", pages.mean_running),
        Fact("steps until all are done, contiguous", len(ranges.snapshots)),
        Fact("steps until all are done, paged", len(pages.snapshots)),
        Fact("speed of paged against contiguous", len(ranges.snapshots) / len(pages.snapshots), "×"),
    )
    return Picture("Block tables against contiguous memory", (*parts, Facts("", facts)))


def _at(run: Run, step: float) -> int:
    return min(len(run.snapshots) - 1, int(step * len(run.snapshots)))


def _running(name: str, run: Run) -> Line:
    counts = tuple(float(len(s.used)) for s in run.snapshots)
    return Line(name, tuple(float(i) for i in range(len(counts))), counts, "steps")


def _paged_cells(run: Run, memory: int, block_size: int, step: float) -> list[Cell]:
    cells = [Cell("")] * max(2, memory // block_size)
    for request, blocks in run.snapshots[_at(run, step)].held.items():
        for block in blocks:
            cells[block] = Cell(f"request {request}", f"{request}")
    return cells


def _range_cells(run: Run, memory: int, block_size: int, step: float) -> list[Cell]:
    snapshot = run.snapshots[_at(run, step)]
    cells = [Cell("")] * max(2, memory // block_size)
    for request, (start, end) in snapshot.held.items():
        filled = start + snapshot.used[request]
        for place in range(start // block_size, min(len(cells), -(-end // block_size))):
            used = place * block_size < filled
            cells[place] = Cell(f"request {request}", f"{request}") if used else Cell("waste", f"{request}")
    return cells


def _grid(title: str, cells: list[Cell]) -> Grid:
    return Grid(title, tuple(tuple(cells[i : i + _WIDTH]) for i in range(0, len(cells), _WIDTH)))


def _tables(run: Run, step: float) -> Table:
    snapshot = run.snapshots[_at(run, step)]
    rows = tuple(
        (
            f"request {request}",
            snapshot.used[request],
            " ".join(map(str, blocks[:12])) + " …" * (len(blocks) > 12),
        )
        for request, blocks in list(snapshot.held.items())[:8]
    )
    return Table("block tables of the first requests", ("", "tokens", "block ids"), rows)


SIMULATION = Simulation(
    "paged-attention",
    "PagedAttention block tables",
    "A contiguous range must be as long as its request may get; blocks are taken when tokens fill them.",
    (
        number("requests", "requests", 48, 1, 200),
        number("prompt", "prompt (median)", 120, 1, 1000, 8, "tokens"),
        number("output", "output (median)", 150, 2, 1000, 8, "tokens"),
        number("max_len", "longest request that is allowed", 2048, 64, 4096, 64, "tokens"),
        number("memory", "memory", 8192, 4096, 65536, 1024, "tokens"),
        number("block_size", "block", 16, 1, 128, 1, "tokens"),
        number("step", "where to look, as a share of the run", 0.25, 0.0, 1.0, 0.01),
        number("seed", "seed", 0, 0, 1000),
    ),
    draw,
)
