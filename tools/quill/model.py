"""The model that training runs: Hugging Face's ``LlamaForCausalLM``, written for training speed on a CPU.

Parameter names, shapes and arithmetic are Llama's (RMSNorm, NeoX-style RoPE, grouped-query attention, SwiGLU, tied
embeddings), so a state dict exports without renaming. Master weights are fp32; matrix products and the residual
stream are bf16. The loss never holds a whole logits matrix: it goes through the vocabulary head in chunks of tokens
and computes the gradient on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class QuillShape:
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


SHAPES = {
    "quill": QuillShape(384, 4, 6, 2, 64, 768),
    "quill-deep": QuillShape(256, 8, 4, 2, 64, 672),
    "quill-draft": QuillShape(128, 3, 4, 2, 32, 320),
}


@torch.compile(dynamic=False)
def _chunk_loss(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Summed nats and their gradient. logits: [chunk, vocab] bf16, index: [chunk, 1]."""
    wide = logits.float()
    log_total = torch.logsumexp(wide, dim=-1, keepdim=True)
    one_hot = (torch.arange(wide.shape[1]) == index).float()
    return (log_total - wide.gather(1, index)).sum(), (torch.exp(wide - log_total) - one_hot).to(logits.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of ``hidden @ weight.T``; hidden: [num_tokens, hidden_size], weight: [vocab, hidden_size]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        weight_bf16 = weight.bfloat16()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float32)
        for start in range(0, hidden.shape[0], LOSS_CHUNK_TOKENS):
            rows = slice(start, start + LOSS_CHUNK_TOKENS)
            logits = hidden[rows] @ weight_bf16.T  # [chunk, vocab]
            loss, grad = _chunk_loss(logits, targets[rows].unsqueeze(1))
            total += loss
            grad_hidden[rows] = grad @ weight_bf16
            grad_weight += grad.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.num_tokens = hidden.shape[0]
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grads[0] / ctx.num_tokens
        return grad_hidden * scale.to(grad_hidden.dtype), grad_weight * scale, None


@torch.compiler.disable
def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v: [batch, heads, length, head_dim]. Plain products: at these lengths they beat torch's CPU flash kernel.

    Rows are taken in halves when they are many, so that the upper-right quarter of the score matrix is never computed.
    """
    length, half = q.shape[2], q.shape[2] // 2
    if length >= 512:
        out = causal_attention(q[:, :, :half], k[:, :, :half], v[:, :, :half])
        return torch.cat([out, _attention_rows(q[:, :, half:], k, v)], dim=2)
    return _attention_rows(q, k, v)


def _attention_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last rows of causal attention: query i sees the keys up to i + (num_keys - num_queries)."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    mask = torch.full((num_queries, num_keys), float("-inf"), dtype=q.dtype).triu(1 + num_keys - num_queries)
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(torch.softmax(scores, dim=-1), v.flatten(0, 1)).view_as(q)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


def _linear(fan_in: int, fan_out: int) -> nn.Linear:
    return nn.Linear(fan_in, fan_out, bias=False)


class Attention(nn.Module):
    def __init__(self, shape: QuillShape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = _linear(shape.hidden_size, q_size)
        self.k_proj = _linear(shape.hidden_size, kv_size)
        self.v_proj = _linear(shape.hidden_size, kv_size)
        self.o_proj = _linear(q_size, shape.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        s = self.shape
        # One product for q, k and v: small products leave the CPU's bf16 units idle.
        fused = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]).to(x.dtype)
        qkv = (
            F.linear(x, fused)
            .view(batch, length, s.num_heads + 2 * s.num_kv_heads, s.head_dim)
            .transpose(1, 2)
        )
        qk, v = qkv.split([s.num_heads + s.num_kv_heads, s.num_kv_heads], dim=1)
        first, second = qk.chunk(2, dim=-1)
        qk = qk * cos + torch.cat([-second, first], dim=-1) * sin
        q, k = qk.split([s.num_heads, s.num_kv_heads], dim=1)
        groups = s.num_heads // s.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = causal_attention(q, k, v)
        return F.linear(out.transpose(1, 2).reshape(batch, length, -1), self.o_proj.weight.to(x.dtype))


class Mlp(nn.Module):
    def __init__(self, shape: QuillShape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = _linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = _linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        fused = torch.cat([self.gate_proj.weight, self.up_proj.weight]).to(x.dtype)
        gate, up = F.linear(x, fused).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down_proj.weight.to(x.dtype))


class Layer(nn.Module):
    def __init__(self, shape: QuillShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, shape: QuillShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embed_tokens(ids).to(cos.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class QuillModel(nn.Module):
    """``backbone`` may be replaced by a compiled version of itself; ``model`` stays the owner of the weights."""

    def __init__(self, shape: QuillShape, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape = shape
        self.model = Backbone(shape)
        for name, weight in self.model.named_parameters():
            if weight.ndim == 2:
                std = 0.02 if "embed" in name else 1.0 / math.sqrt(weight.shape[1])
                # Residual branches start at zero, so that the first steps see the plain embedding.
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    nn.init.zeros_(weight)
                else:
                    nn.init.normal_(weight, std=std)

    def loss(
        self, ids: Tensor, targets: Tensor, backbone: Any = None, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """Mean nats per token. ids, targets: [batch, length] int64."""
        cos, sin = rope_tables(self.shape, ids.shape[1], dtype)
        run = self.model if backbone is None else backbone
        hidden = run(ids, cos, sin).flatten(0, 1)
        loss: Tensor = ChunkedCrossEntropy.apply(hidden, self.model.embed_tokens.weight, targets.flatten())
        return loss

    def token_losses(self, ids: Tensor, targets: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Nats of each target, [batch, length] float32, without gradients."""
        with torch.no_grad():
            cos, sin = rope_tables(self.shape, ids.shape[1], dtype)
            hidden = self.model(ids, cos, sin)
            logits = F.linear(hidden, self.model.embed_tokens.weight.to(dtype)).float()
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def rope_tables(shape: QuillShape, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin: [length, head_dim], the NeoX layout in which the two halves of a head rotate together."""
    inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
