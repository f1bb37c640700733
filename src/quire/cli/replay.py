"""`quire replay`: a recording of the flight recorder, run again on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quire.args import EngineArgs, make_args
from quire.cli.flags import ReplayArgs
from quire.clock import WallClock
from quire.config import DeviceInfo, EngineConfig
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.build import make_executor
from quire.engine.recording_file import about, load
from quire.engine.replay import Outcome, Replay, num_blocks
from quire.errors import ConfigError, ModelLoadError
from quire.executor.recorder import Recording
from quire.models.fingerprint import fingerprint

# Settings of the recorded machine, or of what is not run again.
NOT_HERE = (
    "threads", "step_log", "lora", "speculate", "draft_model", "kv_memory", "gpu_memory", "gpu_memory_utilization"
)  # fmt: skip
SETUP = ("kernels", "formats", "device", "torch", "quire")


def replay(path: Path, args: ReplayArgs) -> int:
    """Print what a replay finds; return 1 where a result differs, else 0.

    Raises:
        ConfigError: the recording cannot be replayed here; the message says why.
        ModelLoadError: its model is not on this machine.
    """
    recording = load(path)
    if not recording.has_ids:
        raise ConfigError(f"{path} was recorded with --no-record-ids: there is nothing to compute from")
    config = _config(recording, args)
    if config.cache.num_states:
        raise ConfigError(
            f"{path} is of a model with recurrent layers, {config.model.spec.architecture}: a recording has no states "
            "to begin from, so it cannot be replayed"
        )
    here = about(config)
    same_bits = config.determinism == "exact" and all(
        here[name] == recording.about[name] for name in ("kernels", "formats", "determinism")
    )
    executor: Any = make_executor(config, "local", WallClock())
    try:
        outcome = Replay(
            recording,
            executor,
            executor.worker.seqs,
            block_size=config.cache.block_size,
            windows=config.cache.windows,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            vocab_size=config.model.spec.vocab_size,
            same_bits=same_bits,
        ).run()
    finally:
        executor.close()
    _print(recording, here, outcome, as_json=args.json, same_bits=same_bits)
    return 0 if outcome.difference is None else 1


def _config(recording: Recording, args: ReplayArgs) -> EngineConfig:
    """Return the configuration of an engine as recorded, on this machine."""
    settings = json.loads(recording.settings)
    device = detect_device(args.device)
    if args.model is not None:
        settings["model"] = args.model
    elif not Path(settings["model"]).exists():
        settings["model"] = recording.about["model"]
    if args.model is not None or not Path(settings["tokenizer"]).exists():
        del settings["tokenizer"]
    for name in NOT_HERE:
        settings.pop(name, None)
    # As many blocks as hold the context: a replay needs fewer.
    settings |= {"device": args.device, "num_kv_blocks": 2**22, "cpu_isa": _level(recording, args, device)}
    if args.threads is not None:
        settings["threads"] = args.threads
    config, checkpoint = configure(make_args(EngineArgs, settings, origin="recording"), device)
    ours, theirs = fingerprint(checkpoint), recording.about["fingerprint"]
    if ours != theirs:
        raise ModelLoadError(
            f"the model at {checkpoint.path} is another one than was recorded: its fingerprint is {ours}, and that of "
            f"the recording {theirs} ({recording.about['model']}). Give the recorded one with --model"
        )
    blocks = num_blocks(recording, len(config.cache.windows))
    return replace(config, cache=replace(config.cache, num_blocks=blocks))


def _level(recording: Recording, args: ReplayArgs, device: DeviceInfo) -> str:
    if args.cpu_isa != "recorded":
        return args.cpu_isa
    level = recording.about["kernels"]
    if device.kind != "cpu" or level == "reference":
        return "auto" if device.kind != "cpu" else level
    return level if device.native and level in device.levels else "auto"


def _print(
    recording: Recording, here: dict[str, str], outcome: Outcome, *, as_json: bool, same_bits: bool
) -> None:
    recorded = recording.about
    if as_json:
        difference = None if outcome.difference is None else asdict(outcome.difference)
        print(json.dumps({"recorded": recorded, "here": here, **outcome._asdict(), "difference": difference}))
        return
    print(
        f"recorded  {recorded['at']}, {recorded['reason']}{': ' + recorded['text'] if recorded['text'] else ''}"
    )
    print(f"model     {recorded['model']}, fingerprint {recorded['fingerprint']}")
    for name in SETUP:
        other = "" if here[name] == recorded[name] else f"; here {here[name]}"
        print(f"{name:9} {recorded[name]}{other}")
    if not same_bits:
        print(
            "          another setup than was recorded: rounding may differ, so only token ids are compared"
        )
    rebuilt = (
        f"; {outcome.num_rebuilt} tokens from before it were computed first" if outcome.num_rebuilt else ""
    )
    print(f"replayed  {outcome.num_steps} steps, {outcome.num_tokens} tokens{rebuilt}")
    for line in outcome.last:
        print(f"          {line}")
    print("equal" if outcome.difference is None else f"first difference: {outcome.difference}")
