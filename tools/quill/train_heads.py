"""Train what drafts for Quill: Medusa heads (Cai et al. 2024) or an EAGLE-3 head (Li et al. 2025), on one CPU core.

Quill is frozen. Both learn its own distribution of the next tokens, not the text: a draft is accepted where it equals
what Quill samples. With ``ids`` a window of the training novels, or what Quill wrote itself behind a passage of them
(`own_samples.py`), and p[t] Quill's distribution of token t + 1 at `TEMPERATURE`:

- Medusa head k reads Quill's last hidden state of token t and learns p[t + k];
- EAGLE: the row of token t + 1 reads its embedding and Quill's hidden states of token t, and learns p[t + 1]. Its own
  hidden state then takes the place of Quill's for the row of token t + 2, and so on (training-time test): a row of
  depth d sees the keys of depth 0 up to its own row, and those of depths 1 … d of its own row.

Usage: ``python tools/quill/train_heads.py eagle --data /tmp/quill --minutes 20 --out /tmp/quill/eagle``, then
``python tools/quill/export_heads.py eagle --checkpoint /tmp/quill/eagle/heads.pt``
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batches import Batches
from model import SHAPES, Mlp, QuillModel, RMSNorm, rope_tables
from optimizer import Muon
from safetensors.torch import load_file
from torch import Tensor, nn

QUILL = Path(__file__).parents[2] / "src/quire/models/quill_data/quill/model.safetensors"
SHAPE = SHAPES["quill"]
TAPS = (1, 2, 3)  # EAGLE reads the hidden states that enter these layers
DRAFT_VOCAB = 2048
EAGLE_INTERMEDIATE = 512
DEPTHS = 3  # of EAGLE's training-time test
NUM_MEDUSA = 3  # heads
MEDUSA_LAYERS = 2
CHUNK = 512  # tokens whose logits are held at once
TEMPERATURE = 0.8  # of the distributions that are learnt: drafts are wanted for sharp ones


class SoftCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of softmax(hidden @ weight.T / T) against the probabilities ``target``, over the same ids.

    hidden: [num_tokens, hidden_size] bf16, weight: [vocab, hidden_size], target: [num_tokens, vocab] bf16.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        weight_bf16 = weight.bfloat16()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        total = torch.zeros(())
        for start in range(0, hidden.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            logits = (hidden[rows] @ weight_bf16.T) / TEMPERATURE
            q = torch.softmax(logits, dim=-1, dtype=torch.float32)
            p = target[rows]
            total -= (
                p[::16].float() * torch.log_softmax(logits[::16].float(), dim=-1)
            ).sum() * 16  # of a sample
            grad = q.sub_(p).bfloat16()
            grad_hidden[rows] = grad @ weight_bf16
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.num_tokens = hidden.shape[0]
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0] / ctx.num_tokens
        return (
            grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * scale,
            None,
        )


class Target:
    """Quill, frozen."""

    def __init__(self) -> None:
        self.model = QuillModel(SHAPE, seed=0)
        self.model.load_state_dict({name: w.float() for name, w in load_file(QUILL).items()})
        self.embedding = self.model.model.embed_tokens.weight.detach()

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Last hidden states, and those that enter `TAPS` side by side: [batch, length, 1 or 3 · hidden_size] bf16."""
        cos, sin = rope_tables(SHAPE, ids.shape[1], torch.bfloat16)
        backbone, taps = self.model.model, []
        x = backbone.embed_tokens(ids).to(cos.dtype)
        for index, layer in enumerate(backbone.layers):
            if index in TAPS:
                taps.append(x)
            x = layer(x, cos, sin)
        return backbone.norm(x), torch.cat(taps, dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.embedding.bfloat16().T


class Medusa(nn.Module):
    """``blocks``: residual blocks per head; the output matrix is Quill's."""

    def __init__(self, target: Target, frequent: Tensor) -> None:
        super().__init__()
        size = SHAPE.hidden_size
        self.target = [target]  # in a list: no parameter of this module
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"layers": nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(MEDUSA_LAYERS))}
            )
            for _ in range(NUM_MEDUSA)
        )
        for name, weight in self.named_parameters():
            if name.endswith(f"layers.{MEDUSA_LAYERS - 1}.weight"):
                nn.init.zeros_(weight)

    def hidden(self, head: int, x: Tensor) -> Tensor:
        for layer in self.blocks[head]["layers"]:  # type: ignore[index]
            x = x + F.silu(F.linear(x, layer.weight.to(x.dtype)))
        return x

    def losses(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per head: the loss, and the share of tokens where it and Quill agree on the most likely token."""
        target = self.target[0]
        last, _ = target(ids)
        wanted = torch.softmax(target.logits(last) / TEMPERATURE, dim=-1)
        found = []
        for head in range(NUM_MEDUSA):
            x = self.hidden(head, last[:, : -head - 1]).flatten(0, 1)
            p = wanted[:, head + 1 :].flatten(0, 1)
            found.append((SoftCrossEntropy.apply(x, target.embedding, p), _agreement(x, target.embedding, p)))
        return found


class Eagle(nn.Module):
    """Weights under the names of the published EAGLE-3 checkpoints."""

    def __init__(self, target: Target, frequent: Tensor) -> None:
        super().__init__()
        self.target = [target]
        s, size = SHAPE, SHAPE.hidden_size
        self.fc = nn.Linear(len(TAPS) * size, size, bias=False)
        self.midlayer = nn.ModuleDict({
            "self_attn": nn.ModuleDict({
                "q_proj": nn.Linear(2 * size, s.num_heads * s.head_dim, bias=False),
                "k_proj": nn.Linear(2 * size, s.num_kv_heads * s.head_dim, bias=False),
                "v_proj": nn.Linear(2 * size, s.num_kv_heads * s.head_dim, bias=False),
                "o_proj": nn.Linear(s.num_heads * s.head_dim, size, bias=False),
            }),
            "hidden_norm": RMSNorm(size, s.rms_norm_eps),
            "input_layernorm": RMSNorm(size, s.rms_norm_eps),
            "post_attention_layernorm": RMSNorm(size, s.rms_norm_eps),
            "mlp": Mlp(_with_intermediate(EAGLE_INTERMEDIATE)),
        })  # fmt: skip
        self.norm = RMSNorm(size, s.rms_norm_eps)
        self.lm_head = nn.Linear(size, DRAFT_VOCAB, bias=False)
        self.register_buffer("ids", frequent)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.ndim == 2:
                nn.init.normal_(weight, std=1.0 / math.sqrt(weight.shape[1]))
        with torch.no_grad():  # begin as Quill's output matrix over the last tap
            self.fc.weight.zero_()[:, -size:] = torch.eye(size)
            self.norm.weight.copy_(target.model.model.norm.weight)
            self.lm_head.weight.copy_(target.embedding[frequent])

    def losses(self, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per depth: the loss, and the share of tokens where it and Quill agree on the most likely token."""
        target = self.target[0]
        last, taps = target(ids)
        length = ids.shape[1] - DEPTHS  # rows that have a target at every depth
        cos, sin = rope_tables(SHAPE, ids.shape[1], taps.dtype)
        every = target.logits(last)
        wanted = torch.softmax(every.index_select(-1, self.ids) / TEMPERATURE, dim=-1)  # type: ignore[arg-type]
        best = every.argmax(dim=-1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        hidden = F.linear(taps[:, :length], self.fc.weight.to(taps.dtype))
        found = []
        for depth in range(DEPTHS):
            rows = slice(depth + 1, depth + 1 + length)  # of the tokens read, and of the distributions learnt
            embeds = F.embedding(ids[:, rows], target.embedding).to(taps.dtype)
            angles = cos[depth : depth + length], sin[depth : depth + length]
            hidden = self._layer(embeds, hidden, angles, keys, values)
            x = self.norm(hidden).flatten(0, 1)
            loss = SoftCrossEntropy.apply(x, self.lm_head.weight, wanted[:, rows].flatten(0, 1))
            with torch.no_grad():  # of a sample
                mine = self.ids[(x[::16] @ self.lm_head.weight.bfloat16().T).argmax(dim=-1)]  # type: ignore[index]
            found.append((loss, (mine == best[:, rows].flatten()[::16]).float().mean()))
        return found

    def _layer(
        self,
        embeds: Tensor,
        hidden: Tensor,
        angles: tuple[Tensor, Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """One decoder layer; ``keys`` and ``values`` have those of the depths before, and get its own."""
        s, layer, dtype = SHAPE, self.midlayer, hidden.dtype
        x = torch.cat([layer["input_layernorm"](embeds), layer["hidden_norm"](hidden)], dim=-1)
        weights = [layer["self_attn"][f"{name}_proj"].weight for name in "qkv"]  # type: ignore[index]
        qkv = F.linear(x, torch.cat(weights).to(dtype))
        qkv = qkv.view(*x.shape[:2], s.num_heads + 2 * s.num_kv_heads, s.head_dim).transpose(1, 2)
        qk, v = qkv.split([s.num_heads + s.num_kv_heads, s.num_kv_heads], dim=1)
        first, second = qk.chunk(2, dim=-1)
        qk = qk * angles[0] + torch.cat([-second, first], dim=-1) * angles[1]
        q, k = qk.split([s.num_heads, s.num_kv_heads], dim=1)
        groups = s.num_heads // s.num_kv_heads
        keys.append(k.repeat_interleave(groups, dim=1))
        values.append(v.repeat_interleave(groups, dim=1))
        q = q * s.head_dim**-0.5
        length = q.shape[2]
        mask = torch.full((length, length), float("-inf"), dtype=dtype).triu(1)
        scores = [q @ keys[0].transpose(2, 3) + mask]  # [batch, heads, length, length]
        scores += [(q * own).sum(dim=-1, keepdim=True) for own in keys[1:]]
        shares = torch.softmax(torch.cat(scores, dim=-1).float(), dim=-1).to(dtype)
        out = shares[..., :length] @ values[0]
        for depth, own in enumerate(values[1:]):
            out = out + shares[..., length + depth, None] * own
        out = out.transpose(1, 2).reshape(*x.shape[:2], -1)
        hidden = hidden + F.linear(out, layer["self_attn"]["o_proj"].weight.to(dtype))  # type: ignore[index]
        return hidden + layer["mlp"](layer["post_attention_layernorm"](hidden))


def _with_intermediate(size: int) -> Any:
    return type(SHAPE)(
        **{**{k: getattr(SHAPE, k) for k in SHAPE.__dataclass_fields__}, "intermediate_size": size}
    )


@torch.no_grad()
def _agreement(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    mine = (hidden[::16] @ weight.bfloat16().T).argmax(dim=-1)  # of a sample
    return (mine == target[::16].argmax(dim=-1)).float().mean()


KINDS = {"medusa": Medusa, "eagle": Eagle}


def frequent_ids(data: Path) -> Tensor:
    """The `DRAFT_VOCAB` most frequent ids of the training text, ascending."""
    counts = np.bincount(np.load(data / "text.npy"), minlength=SHAPE.vocab_size)
    counts += np.bincount(np.load(data / "chat.npy"), minlength=SHAPE.vocab_size)
    best = np.argsort(-counts, kind="stable")[:DRAFT_VOCAB]
    print(f"{DRAFT_VOCAB} ids are {counts[best].sum() / counts.sum():.4f} of the text", flush=True)
    return torch.from_numpy(np.sort(best).astype(np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--start", type=Path, help="heads.pt to go on from; give another --seed for other windows"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of CPU time; ends earlier where it is up"
    )
    parser.add_argument("--own-share", type=float, default=0.6, help="of what Quill wrote itself")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--muon-lr", type=float, default=0.04)
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "rendezvous").unlink(missing_ok=True)
    dist.init_process_group("gloo", init_method=f"file://{args.out}/rendezvous", rank=0, world_size=1)
    heads = KINDS[args.kind](Target(), frequent_ids(args.data))
    if args.start is not None:
        heads.load_state_dict(torch.load(args.start, weights_only=True))
    named = [(name, p) for name, p in heads.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if p.ndim == 2 and "lm_head" not in name]
    others = [p for name, p in named if p.ndim != 2 or "lm_head" in name]
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, lr=args.muon_lr)]
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0))
    batches = Batches(args.data, args.seed, 0.05, 0, 1)
    own = torch.from_numpy(np.load(args.data / "own.npy").astype(np.int64))
    num_own = round(args.own_share * args.batch_tokens / args.length)
    began, running = time.process_time(), None
    for step in range(args.steps):
        done = max((step + 1) / args.steps, (time.process_time() - began) / 60 / args.minutes)
        factor = min(
            1.0, (step + 1) / 10, max(0.02, (1.0 - done) / 0.6)
        )  # constant, then linear to nearly zero
        for optimizer, base in zip(optimizers, (args.muon_lr, args.adam_lr), strict=False):
            optimizer.param_groups[0]["lr"] = base * factor
        ids, _ = batches.draw(args.batch_tokens // args.length - num_own, args.length)
        picked = torch.randint(len(own), (num_own,))
        ids = torch.cat((ids, own[picked, : args.length]))
        losses = heads.losses(ids)
        loss = sum(0.8**place * each for place, (each, _) in enumerate(losses))
        loss.backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        now = torch.stack([torch.stack([each.detach(), share]) for each, share in losses])
        running = now if running is None else running.lerp(now, 0.1)
        if step % 20 == 19 or done >= 1.0:
            line = {"step": step + 1, "s": round(time.process_time() - began), "lr": round(factor, 3)}
            values = {
                k: [round(v, 3) for v in running[:, i].tolist()] for i, k in enumerate(("nats", "agree"))
            }
            print(json.dumps(line | values), flush=True)
            state = {name: weight.detach().clone() for name, weight in heads.state_dict().items()}
            torch.save(state, args.out / "heads.tmp")
            (args.out / "heads.tmp").replace(args.out / "heads.pt")
        if done >= 1.0:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
