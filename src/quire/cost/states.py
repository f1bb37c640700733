"""How many recurrent states an engine has memory for: one per running sequence, and those of checkpoints."""

from __future__ import annotations

from dataclasses import fields, replace

from quire.args import EngineArgs
from quire.config import DeviceInfo
from quire.cost.speculation import TREES, spec_tokens
from quire.errors import ConfigError
from quire.modelspec import ModelSpec

# Of the memory that the weights leave: states may have a quarter, as much as keys and values have at least.
STATE_SHARE = 0.25
# Checkpoints per sequence where memory allows: the ends of a few conversations, and a few places of each prompt. A
# server of fewer than eight has long conversations, which need as many.
PER_SEQUENCE = 4


def fit_states(
    args: EngineArgs, spec: ModelSpec, device: DeviceInfo | None, left: int
) -> tuple[EngineArgs, dict[str, int], int, tuple[str, ...]]:
    """Return the slots of a model with recurrent layers, where the weights leave ``left`` bytes.

    ``device``: where it runs; None: nowhere, since it is simulated.

    The results: ``args``, with fewer sequences at once if the default is more than there are states for; the fields of
    `CacheConfig` that are about states; bytes of the pool; remarks.

    Raises:
        ConfigError: a setting that such a model does not run with, or states that do not fit.
    """
    if device is not None:
        _refuse_unmet(args, device)
    size, wanted = spec.state_bytes_per_sequence, args.max_num_seqs
    per_sequence = 1 if args.state_checkpoints == "off" or not args.enable_prefix_caching else 2
    num_drafts = spec_tokens(args)
    share = int(left * STATE_SHARE)
    most = _most(share // size, per_sequence, num_drafts)
    remarks: tuple[str, ...] = ()
    if args.state_checkpoints in ("auto", "off") and wanted > most:
        default = next(field.default for field in fields(EngineArgs) if field.name == "max_num_seqs")
        if wanted != default or most < 1:
            raise ConfigError(
                f"max_num_seqs = {wanted} sequences have recurrent states of {size / 2**20:.1f} MiB each, with a "
                f"checkpoint twice as much, and {share / 2**30:.2f} GiB of memory are for them: at most "
                f"{most} sequences fit. Lower max_num_seqs, or set state_checkpoints",
                param="max_num_seqs",
            )
        args = replace(args, max_num_seqs=most)
        remarks = (
            f"{most} sequences run at once, not {wanted}: each has a recurrent state of {size / 2**20:.1f} MiB and "
            "room for a checkpoint",
        )
    # The scheduler verifies no more drafts in a step than there are slots for.
    num_draft_states = num_drafts * min(args.max_num_seqs, TREES)
    num_checkpoints = _num_checkpoints(args, size, left, share - num_draft_states * size)
    counts = {"num_states": args.max_num_seqs, "num_checkpoints": num_checkpoints}
    counts |= {"num_draft_states": num_draft_states}
    return args, counts | {"state_bytes": size}, sum(counts.values()) * size, remarks


def _most(num_slots: int, per_sequence: int, num_drafts: int) -> int:
    """Return how many sequences ``num_slots`` slots are for."""
    few = num_slots // (per_sequence + num_drafts)
    return few if few < TREES else (num_slots - TREES * num_drafts) // per_sequence


def _num_checkpoints(args: EngineArgs, size: int, left: int, share: int) -> int:
    """Return the slots for checkpoints."""
    live, wanted = args.max_num_seqs, args.state_checkpoints
    wanted = int(wanted) if str(wanted).isdigit() else wanted
    if wanted == "off" or not args.enable_prefix_caching:
        return 0
    if wanted == "auto":
        return min(PER_SEQUENCE * max(live, 8), share // size - live)
    if not isinstance(wanted, int) or wanted < live:
        raise ConfigError(
            f"state_checkpoints = {wanted!r} must be auto, off, or an integer of at least max_num_seqs = {live}, one "
            "per sequence that runs: raise it, or lower max_num_seqs"
        )
    if (live + wanted) * size >= left:
        raise ConfigError(
            f"{live} recurrent states and {wanted} checkpoints of {size / 2**20:.1f} MiB each are more than the "
            f"{left / 2**30:.2f} GiB that the weights leave, which hold {left // size} in all: lower state_checkpoints "
            "or max_num_seqs"
        )
    return wanted


def _refuse_unmet(args: EngineArgs, device: DeviceInfo) -> None:
    """Refuse what a model with recurrent layers does not run with."""
    if args.speculate == "lookahead":
        raise ConfigError(
            "speculate = 'lookahead': this model has recurrent layers, whose states follow one path of drafts: set "
            "another, such as 'ngram'"
        )
    if args.spec_tree != 1:
        raise ConfigError(
            f"spec_tree = {args.spec_tree}: this model has recurrent layers, whose states follow one path of drafts: "
            "leave it at 1"
        )
    if args.context_parallel_size > 1:
        raise ConfigError(
            f"context_parallel_size = {args.context_parallel_size}: this model has recurrent layers, which need every "
            "token of a sequence in order: leave it at 1"
        )
    if device.kind != "cpu":
        raise ConfigError(
            f"This model has recurrent layers, whose kernels are for CPUs, and the device is {device.name}: set "
            "device = 'cpu'"
        )
