"""Bits per byte and perplexity of a model on a text, computed by Quire's own decoder in the formats asked for."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from quire.args import EngineArgs
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.kernels import registry
from quire.models.decoder import Decoder
from quire.models.loader import iter_weights
from quire.runner.input_batch import StepBuffers
from quire.runner.memory import KvCache, torch_dtype

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Text:
    """Windows of token ids, each after ``bos``, and the bytes that all of them spell."""

    windows: tuple[tuple[int, ...], ...]
    bos: int
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        return sum(len(window) for window in self.windows)


def text_of(path: Path, tokenizer: Path, bos: int, window: int, num_windows: int) -> Text:
    """Cut a text into ``num_windows`` windows of ``window`` tokens, spread evenly over it."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    coder = Tokenizer.from_file(str(tokenizer))
    ids = coder.encode(raw.decode(), add_special_tokens=False).ids
    starts = np.linspace(0, len(ids) - window, num_windows).astype(int) if num_windows > 1 else [0]
    windows = tuple(tuple(ids[start : start + window]) for start in starts)
    size = sum(len(coder.decode(list(part), skip_special_tokens=False).encode()) for part in windows)
    return Text(windows, bos, size)


@torch.inference_mode()
def nats(args: EngineArgs, text: Text) -> float:
    """Return −Σ ln p of all tokens of ``text``, each given those before it in its window."""
    config, _ = configure(args, detect_device())
    model, longest = config.model, max(len(window) for window in text.windows)
    kernels = registry.choose(config.runner)
    dtype = torch_dtype(model.dtype)
    decoder = Decoder(
        model.spec, config.kv_layout, model.max_model_len, dtype, kernels, formats=model.formats
    )
    decoder.load(iter_weights(model, dtype))
    blocks = -(-longest // BLOCK_SIZE)
    assert len(config.kv_layout.groups) == 1
    kv = KvCache(model.spec, config.kv_layout, blocks, BLOCK_SIZE, model.kv_dtype, kernels)
    buffers = StepBuffers(longest, longest, blocks, 1)
    total = 0.0
    for window in text.windows:
        count = len(window)
        buffers.input_ids[:count] = (text.bos, *window[:-1])
        buffers.positions[:count] = np.arange(count)
        buffers.logits_indices[:count] = np.arange(count)
        buffers.slot_blocks[0][:count] = np.arange(count) // BLOCK_SIZE
        buffers.slot_offsets[:count] = np.arange(count) % BLOCK_SIZE
        buffers.block_tables[0][0, :blocks] = np.arange(blocks)
        buffers.cu_seqlens_q[1] = buffers.seq_lens[0] = count
        logits = decoder.logits(decoder.forward(buffers.batch(count, 1, count), kv.views))
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(window), reduction="sum"))
    return total


def bits_per_byte(total: float, text: Text) -> float:
    return total / math.log(2) / text.num_bytes


def perplexity(total: float, text: Text) -> float:
    """A token's."""
    return math.exp(total / text.num_tokens)
