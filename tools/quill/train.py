"""Train Quill: data-parallel processes of one thread each, Muon + AdamW, warmup-stable-decay, resumable.

Each process draws its own windows, gradients are averaged by one gloo all-reduce per optimizer step, and every process
applies the same update, so the weights stay equal bit by bit. One thread per process because a stolen core then delays
one all-reduce, not every OpenMP barrier.

The schedule is a function of tokens seen, in fractions of ``--tokens``: linear warmup, constant, then linear decay to
zero from ``--decay-from``. The decay can be started (or re-planned) at any time: write a number of tokens to
``OUT/decay_tokens`` and at the next step it begins and lasts that long (the clock of a shared machine is no friend of
fixed plans). ``--stages 256:0.6,512:0.85,1024:1`` is the sequence-length curriculum: length up to fraction.

Usage: ``nice -n 19 torchrun --standalone --nproc-per-node 2 tools/quill/train.py --shape quill --data /tmp/quill --out
/tmp/quill/run --tokens 40e6``
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from batches import Batches
from make_data import BOS_ID
from model import SHAPES, QuillModel
from optimizer import make_optimizers
from torch import Tensor


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--tokens", type=float, required=True, help="tokens of the whole schedule, all processes"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=16384, help="tokens per optimizer step, all processes"
    )
    parser.add_argument(
        "--micro-tokens", type=int, default=4096, help="tokens per forward pass of one process"
    )
    parser.add_argument("--stages", default="256:0.6,512:0.85,1024:1")
    parser.add_argument("--decay-from", type=float, default=0.6)
    parser.add_argument("--warmup-tokens", type=float, default=0.5e6)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--chat-share", type=float, default=0.05)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint-seconds", type=float, default=240)
    parser.add_argument("--stop-tokens", type=float, default=math.inf, help="leave early, for comparisons")
    return parser.parse_args()


class Schedule:
    """Learning-rate factor and sequence length as functions of the tokens seen."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.total = args.tokens
        self.warmup = args.warmup_tokens
        self.decay_start = args.decay_from * args.tokens
        self.stages = [(int(n), float(f)) for n, f in (stage.split(":") for stage in args.stages.split(","))]

    def decay_now(self, seen: float, decay_tokens: float) -> None:
        """End after ``decay_tokens`` more, going to zero linearly from the present factor."""
        factor = self.factor(seen)
        self.total = seen + decay_tokens
        self.decay_start = self.total - decay_tokens / factor

    def factor(self, seen: float) -> float:
        if seen < self.warmup:
            return seen / self.warmup
        return min(1.0, max(0.0, (self.total - seen) / max(1.0, self.total - self.decay_start)))

    def length(self, seen: float) -> int:
        return next((n for n, fraction in self.stages if seen < fraction * self.total), self.stages[-1][0])


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model = QuillModel(SHAPES[args.shape], args.seed)
        self.params = list(self.model.parameters())
        self.optimizers = make_optimizers(self.model, args.muon_lr, args.adam_lr, args.weight_decay)
        self.base_lrs = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self.backbone = torch.compile(self.model.model, dynamic=False) if args.compile else None
        self.batches = Batches(args.data, args.seed, args.chat_share, self.rank, self.world)
        self.schedule = Schedule(args)
        self.seen = 0  # tokens, all processes
        self.seconds = 0.0
        self.valid = np.load(args.data / "valid.npy").astype(np.int64)
        self.valid_bytes_per_token = (
            json.loads((args.data / "data.json").read_text())["valid_bytes"] / self.valid.size
        )

    def step(self) -> tuple[float, float]:
        """One optimizer step; returns (loss in nats per token over all processes, gradient norm)."""
        length = self.schedule.length(self.seen)
        num_micro = max(1, self.args.batch_tokens // (self.world * self.args.micro_tokens))
        loss_sum = 0.0
        for _ in range(num_micro):
            ids, targets = self.batches.draw(self.args.micro_tokens // length, length)
            loss = self.model.loss(ids, targets, self.backbone) / num_micro
            loss.backward()
            loss_sum += loss.item()
        flat = torch.cat([p.grad.flatten() for p in self.params] + [torch.tensor([loss_sum])])
        dist.all_reduce(flat)
        flat /= self.world
        norm = self._set_gradients(flat[:-1])
        factor = self.schedule.factor(self.seen)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, base in zip(groups, self.base_lrs, strict=True):
            group["lr"] = base * factor
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.seen += num_micro * self.args.micro_tokens * self.world
        return float(flat[-1]), norm

    def _set_gradients(self, flat: Tensor) -> float:
        norm = float(flat.norm())
        flat *= min(1.0, self.args.clip / (norm + 1e-6))
        for param, grad in zip(self.params, flat.split([p.numel() for p in self.params]), strict=True):
            assert param.grad is not None
            param.grad.copy_(grad.view_as(param))
        return norm

    def evaluate(self, num_windows: int = 64) -> float:
        """Bits per byte of the second halves of evenly spaced validation windows of the present length."""
        length = self.schedule.length(self.seen)
        starts = np.linspace(0, self.valid.size - length, num_windows).astype(int)[self.rank :: self.world]
        totals = torch.zeros(2, dtype=torch.float64)
        for start in starts:
            targets = torch.from_numpy(self.valid[start : start + length]).unsqueeze(0)
            ids = torch.cat([torch.full((1, 1), BOS_ID), targets[:, :-1]], dim=1)
            nats = self.model.token_losses(ids, targets)[:, length // 2 :]
            totals += torch.tensor([float(nats.sum()), nats.numel()], dtype=torch.float64)
        dist.all_reduce(totals)
        return float(totals[0] / totals[1]) / math.log(2) / self.valid_bytes_per_token

    def save(self) -> None:
        """Rank 0 writes the shared state; every rank would write the same weights."""
        if self.rank != 0:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "seen": self.seen,
            "seconds": self.seconds,
            "drawn": (self.batches.text.num_tokens_drawn, self.batches.chat.num_tokens_drawn),
            "schedule": vars(self.schedule),
            "args": {key: str(value) for key, value in vars(self.args).items()},
        }
        path = self.args.out / "checkpoint.pt"
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def load(self) -> None:
        path = self.args.out / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.seen, self.seconds = state["seen"], state["seconds"]
        self.batches.text.num_tokens_drawn, self.batches.chat.num_tokens_drawn = state["drawn"]
        vars(self.schedule).update(state["schedule"])

    def run(self) -> None:
        self.load()
        started, step_started, saved = time.monotonic() - self.seconds, time.monotonic(), time.monotonic()
        num_steps, running = 0, 0.0
        while self.seen < min(self.schedule.total, self.args.stop_tokens):
            self._read_decay_request()
            loss, norm = self.step()
            self.seconds = time.monotonic() - started
            num_steps, running = num_steps + 1, running + loss
            if num_steps % 20 == 0:
                rate = 20 * self.args.batch_tokens / (time.monotonic() - step_started)
                self._log(loss=running / 20, norm=norm, rate=round(rate))
                step_started, running = time.monotonic(), 0.0
            if self._agree(time.monotonic() - saved > self.args.checkpoint_seconds):
                self._log(valid_bpb=self.evaluate())
                self.save()
                saved = time.monotonic()
        self._log(valid_bpb=self.evaluate(num_windows=96), final=True)
        self.save()

    def _read_decay_request(self) -> None:
        """Only rank 0 looks at the file, so that all ranks act at the same step."""
        path = self.args.out / "decay_tokens"
        request = torch.zeros(1, dtype=torch.float64)
        if self.rank == 0 and path.exists():
            request[0] = float(path.read_text())
            path.unlink()
        dist.broadcast(request, src=0)
        if float(request) > 0:
            self.schedule.decay_now(self.seen, float(request))
            self._log(decay_until=self.schedule.total)

    def _agree(self, mine: bool) -> bool:
        flag = torch.tensor([float(mine)])
        dist.broadcast(flag, src=0)
        return bool(flag)

    def _log(self, **values: object) -> None:
        if self.rank == 0:
            head = {"seen": self.seen, "s": round(self.seconds), "len": self.schedule.length(self.seen)}
            head["lr"] = round(self.schedule.factor(self.seen), 4)
            line = json.dumps(
                head | {k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()}
            )
            print(line, flush=True)
            with (self.args.out / "log.jsonl").open("a") as file:
                file.write(line + "\n")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    Trainer(args).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
