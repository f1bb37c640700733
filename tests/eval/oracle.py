"""A tiny Llama on disk with Quill's tokenizer, its logits in numpy's float64, and figures by plain loops."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from quire.families import spec_from_config, weight_map
from quire.models.hub import quill_path

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
Floats = NDArray[np.float64]


def write_model(folder: Path, seed: int, near: Path | None = None) -> Path:
    """Write a random model, or one whose weights lie near those of ``near``; return its folder."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    base = {} if near is None else load_file(near / "model.safetensors")
    tensors = {}
    for takes in weight_map(spec_from_config(CONFIG)).sources.values():
        for name in takes[0].names:
            noise = torch.randn(takes[0].shape, generator=generator) * (0.3 if near is None else 0.12)
            centre = base.get(name, torch.full_like(noise, 1.0 if name.endswith("norm.weight") else 0.0))
            tensors[name] = centre + noise
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(quill_path("quill") / name, folder / name)
    return folder


def logits_of(folder: Path, token_ids: list[int]) -> Floats:
    """Return the logits after each token: ``[len(token_ids), vocab_size]``."""
    w = {name: t.double().numpy() for name, t in load_file(folder / "model.safetensors").items()}
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    length, dim = len(token_ids), CONFIG["hidden_size"] // heads
    x = w["model.embed_tokens.weight"][token_ids]
    angles = np.arange(length)[:, None] * CONFIG["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    cos, sin = (np.concatenate((f(angles), f(angles)), 1)[:, None] for f in (np.cos, np.sin))
    visible = np.tril(np.ones((length, length), bool))

    def norm(y: Floats, name: str) -> Floats:
        return y / np.sqrt((y * y).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * w[name]

    def rotated(y: Floats) -> Floats:
        half = np.concatenate((-y[..., dim // 2 :], y[..., : dim // 2]), -1)
        return y * cos + half * sin

    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        y = norm(x, f"{at}input_layernorm.weight")
        q, k, v = ((y @ w[f"{at}self_attn.{part}_proj.weight"].T).reshape(length, -1, dim) for part in "qkv")
        q, k = rotated(q), rotated(k)
        k, v = (np.repeat(each, heads // kv_heads, axis=1) for each in (k, v))
        scores = np.where(visible, np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim), -np.inf)
        weights = np.exp(log_softmax(scores))
        x = (
            x
            + np.einsum("hqk,khd->qhd", weights, v).reshape(length, -1) @ w[f"{at}self_attn.o_proj.weight"].T
        )
        y = norm(x, f"{at}post_attention_layernorm.weight")
        gate, up = (y @ w[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (gate / (1.0 + np.exp(-gate)) * up) @ w[f"{at}mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def log_softmax(values: Floats) -> Floats:
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def scored_by_hugging_face(num_tokens: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (start of the window, its end, token scored): the loop of transformers' page on perplexity."""
    scored, before = [], 0
    for begin in range(0, num_tokens, stride):
        end = min(begin + context, num_tokens)
        targets = end - before  # labels before the last of these are -100
        # Labels are shifted by one, so a window's first token is never scored.
        scored += [(begin, end, token) for token in range(max(end - targets, begin + 1), end)]
        before = end
        if end == num_tokens:
            break
    return scored


def scored_by_llama_cpp(num_tokens: int, context: int) -> list[tuple[int, int, int]]:
    """The same of llama-perplexity: rows ``context / 2 … context - 2`` of each chunk, and the tokens after them."""
    scored = []
    for chunk in range(num_tokens // context):
        start = chunk * context
        for row in range(context // 2, context - 1):
            scored.append((start, start + context, start + row + 1))
    return scored
