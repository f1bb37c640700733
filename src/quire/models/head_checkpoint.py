"""`open_heads`: Medusa and EAGLE heads in a folder of their own, or the MTP layer of a checkpoint. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.errors import ModelLoadError
from quire.families import decoder_config, quantization_of
from quire.families.head_spec import HeadSpec
from quire.families.heads import method_of, read_heads
from quire.families.mtp import read_mtp
from quire.families.shape import Fields
from quire.models.checkpoint import read_json
from quire.models.safetensors_file import StoredTensor, checkpoint_files, read_checkpoint, read_safetensors
from quire.models.weight_sources import Source, find_sources
from quire.modelspec import ModelSpec

PICKLES = ("*.pt", "*.bin", "*.pth")  # medusa_lm_head.pt, pytorch_model.bin


def open_heads(
    path: Path, target: ModelSpec, *, mtp: bool = False
) -> tuple[HeadSpec, Mapping[str, StoredTensor], Mapping[str, Source]]:
    """Return the heads at ``path`` for the model ``target``, their tensors, and where each weight comes from.

    Raises:
        ModelLoadError: they are missing, pickled, damaged, or for another model: the text names the first difference.
        UnsupportedModelError: they are of a kind that is not read.
    """
    config = path / "config.json"
    if not config.is_file():
        raise ModelLoadError(f"{path} has no config.json: give the folder of heads as it was published.")
    _refuse_pickles(path)
    fields = Fields(read_json(config), str(config))
    if mtp:
        stored = read_checkpoint(path)
        spec, names = read_mtp(_of_decoder(config), target)
        quantization = quantization_of(fields.values, str(config))
        return spec, stored, find_sources(str(path), names, stored, quantization)
    stored = {name: t for file in checkpoint_files(path) for name, t in read_safetensors(file).items()}
    spec, names = read_heads(fields, {name: tensor.shape for name, tensor in stored.items()}, target)
    return spec, stored, find_sources(str(path), names, stored)


def mtp_spec(path: Path, target: ModelSpec) -> HeadSpec:
    """Return the MTP layer that the configuration at ``path`` promises, without its weights. Raises as `read_mtp`."""
    config = path / "config.json"
    return read_mtp(_of_decoder(config), target)[0]


def _of_decoder(config: Path) -> Fields:
    return Fields(decoder_config(read_json(config), str(config)), str(config))


def holds_heads(path: Path) -> bool:
    """Whether the folder at ``path`` has the tensors of heads, not of a model. Raises `ModelLoadError` for a pickle."""
    if not (path / "config.json").is_file():
        return False
    try:
        files = checkpoint_files(path)
    except ModelLoadError:
        _refuse_pickles(path)
        return False
    stored = {name: t.shape for file in files for name, t in read_safetensors(file).items()}
    return method_of(read_json(path / "config.json"), stored) is not None


def _refuse_pickles(path: Path) -> None:
    """Say how heads that are published as a pickle are converted."""
    pickles = sorted(file for pattern in PICKLES for file in path.glob(pattern))
    if not pickles or any(path.glob("*.safetensors")):
        return
    raise ModelLoadError(
        f"{pickles[0]} is a pickle, which can run code and is not read. If you trust it, convert it once: python -c "
        f'"import torch; from safetensors.torch import save_file; save_file({{k: v.contiguous() for k, v in '
        f"torch.load('{pickles[0]}', map_location='cpu', weights_only=True).items()}}, "
        f"'{path / 'model.safetensors'}')\""
    )
