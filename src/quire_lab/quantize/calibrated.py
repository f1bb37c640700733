"""Layers one after the other with the calibration text: what each linear reads, and what the rounded layer hands on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.args import EngineArgs
from quire.config import DeviceInfo, EngineConfig
from quire.errors import ConfigError
from quire.families.weights import Take
from quire.models.checkpoint import read_tokenizer
from quire.models.safetensors_file import read_safetensors
from quire.models.stored_weights import view
from quire.resolve import resolve
from quire_lab.quantize.args import QuantizeArgs
from quire_lab.quantize.calibration import calibration_ids
from quire_lab.quantize.folder import OutFolder
from quire_lab.quantize.forward import InputStats, LoadedLayer, first_hidden
from quire_lab.quantize.source import Source
from quire_lab.quantize.work import LayerWork, Results


class Calibration:
    """Hidden states in front of the next layer. `stats` then `hand_on`, for each layer in turn."""

    def __init__(self, source: Source, args: QuantizeArgs, device: DeviceInfo) -> None:
        """Read the text. Raises `ConfigError` where there is too little, or the model is not run on it."""
        self._source = source
        num_tokens = args.calib_tokens or 512
        self._config = _config(source, device)
        longest = self._config.model.max_model_len
        if num_tokens > longest:
            raise ConfigError(f"calib_tokens = {num_tokens} is more than the model's context of {longest}")
        tokenizer = read_tokenizer(Path(self._config.model.tokenizer))
        self._ids = calibration_ids(tokenizer, args.calib, args.calib_samples or 128, num_tokens)
        self._hidden = first_hidden(self._config, self._ids)
        self._layer: LoadedLayer | None = None

    def go_on(self, folder: OutFolder, layer: int) -> None:
        """Take the hidden states that an earlier run left in front of ``layer``."""
        path = folder.state(layer)
        self._hidden = view(read_safetensors(path)["hidden"]).clone()

    def stats(self, layer: int) -> dict[str, InputStats]:
        """Run the layer as it is; return what its matrices read, by their names. Common inputs are one object."""
        self._layer = LoadedLayer(self._config, layer, self._ids)
        by_linear: dict[int, InputStats] = {}
        observed, by_matrix = {}, {}
        for matrix in (m for m in self._source.matrices if m.layer == layer):
            linear = self._layer.linears.get(matrix.parts[0])
            if linear is not None:
                stats = by_linear.setdefault(id(linear), InputStats(matrix.in_features))
                observed[matrix.parts[0]] = by_matrix[matrix.name] = stats
        self._layer.observe(observed)
        self._layer.run(self._hidden)
        self._layer.observe(None)
        return by_matrix

    def hand_on(self, folder: OutFolder, layer: int, work: LayerWork, results: Results) -> None:
        """Run the layer with its rounded matrices, and keep what it returns."""
        assert self._layer is not None
        rounded = {m.tensor: results[m.name].expand() for m in work.matrices if m.name in results}
        for part in {part for m in work.matrices for part in m.parts if m.name in results}:
            if part in self._source.experts:
                names = self._source.experts[part]
                taken = torch.stack([rounded.get(n, work.weights[n.removesuffix(".weight")]) for n in names])
            else:
                name, take = self._source.takes[part]
                taken = _taken(rounded[name], take)
            self._layer.loaders[part](taken.to(self._layer.dtype))
        for name in work.changed:
            self._layer.loaders[f"layers.{layer}.{name}"](work.plain[name])
        self._hidden = self._layer.run(self._hidden)
        self._layer = None
        if layer + 1 < self._source.num_layers:
            folder.keep_state(layer + 1, self._hidden)


def _taken(matrix: Tensor, take: Take) -> Tensor:
    """Return the rows of a stored matrix that a canonical weight has."""
    assert take.dim == 0
    if take.pieces:
        return torch.cat([matrix[piece.start : piece.stop] for piece in take.pieces])
    return matrix[take.start : take.stop : take.step].contiguous()


def _config(source: Source, device: DeviceInfo) -> EngineConfig:
    path: Any = str(source.folder)
    args = EngineArgs(model=path, packed_cache="off", device="cpu")
    config = resolve(args, source.checkpoint.spec, device, path=path, tokenizer=path, stored={}, remarks=())
    return replace(config, cache=replace(config.cache, enable_prefix_caching=False))
