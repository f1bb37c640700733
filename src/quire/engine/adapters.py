"""`AdapterRegistry`: the LoRA adapters that requests may name, on the API side. Torch-free.

There may be more adapters than slots: workers load an adapter when a request that uses it is admitted. A request
carries its whole `Adapter`, so neither the core nor a restarted engine needs a list.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ConfigError, ModelLoadError, NotFoundError, RequestError
from quire.models.checkpoint import Checkpoint
from quire.models.hub import locate
from quire.modelspec import ModelSpec
from quire.request import Adapter

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class AdapterRegistry:
    """Adapters by the name that requests use as ``model``."""

    spec: ModelSpec
    max_rank: int  # rank that a slot holds; 0: the engine has no slots
    base_names: tuple[str, ...]  # the model's own names, which no adapter may take
    adapters: dict[str, Adapter]
    saved: tuple[str, ...] = ()  # modules that a slot has room for whole
    model: Path | None = None  # on disk; None: random weights

    @classmethod
    def of(cls, config: EngineConfig, base_names: tuple[str, ...]) -> AdapterRegistry:
        """Return the registry with the adapters of `LoraConfig.adapters`.

        Raises:
            ConfigError: an adapter has a name of the model.
        """
        lora = config.lora
        model = None if config.model.load_format == "random" else Path(config.model.path)
        if lora is None:
            return cls(config.model.spec, 0, base_names, {})
        registry = cls(config.model.spec, lora.max_rank, base_names, {}, lora.saved, model)
        for adapter in lora.adapters:
            if adapter.name in base_names:
                raise ConfigError(
                    f"lora: {adapter.name!r} is the model's own name; give the adapter another one."
                )
            registry.adapters[adapter.name] = adapter
        return registry

    def read(self, name: str, path: str) -> Adapter:
        """Return the adapter at ``path`` if it fits this engine, without adding it. Reads from disk or the hub.

        Raises:
            RequestError: names the field; the text says what is wrong with the adapter.
        """
        if not self.max_rank:
            raise RequestError(
                "This engine has no room for adapters: start it with --max-loras (and --max-lora-rank).",
                param="lora_name",
            )
        if not name or name in self.base_names:
            raise RequestError(
                f"{name!r} cannot be the name of an adapter: choose another.", param="lora_name"
            )
        try:
            adapter, remarks = _read(name, path, self.spec, self.model)
        except ModelLoadError as error:
            raise RequestError(str(error), param="lora_path") from None
        for line in remarks:
            _log.warning(line)
        if adapter.rank > self.max_rank:
            raise RequestError(
                f"The adapter at {path} has rank {adapter.rank}, and a slot of this engine holds {self.max_rank}: "
                f"start it with --max-lora-rank {adapter.rank}.",
                param="lora_path",
            )
        more = sorted(set(adapter.saved) - set(self.saved))
        if more:
            raise RequestError(
                f"The adapter at {path} brings {' and '.join(more)} whole (modules_to_save), and a slot of this engine "
                f"has no room for that: start it with --lora-modules-to-save {more[0]}.",
                param="lora_path",
            )
        return adapter

    def add(self, adapter: Adapter, *, replace: bool = False) -> None:
        """Serve ``adapter`` from now on.

        Raises:
            RequestError: the name is taken and ``replace`` is not set.
        """
        taken = self.adapters.get(adapter.name)
        if taken is not None and not replace:
            raise RequestError(
                f"An adapter {adapter.name!r} is loaded already, from {taken.path}: unload it first, or choose another "
                "name.",
                param="lora_name",
            )
        self.adapters[adapter.name] = adapter

    def load(self, name: str, path: str) -> None:
        """`read` and `add` in one call, for `quire.LLM`."""
        self.add(self.read(name, path))

    def for_each(self, named: str | Sequence[str | None] | None, count: int) -> list[Adapter | None]:
        """Return the adapter of each of ``count`` prompts: one name for all, or one per prompt (None: the model).

        Raises:
            RequestError: the number of names is wrong.
            NotFoundError: there is no adapter of that name.
        """
        names = [named] * count if named is None or isinstance(named, str) else list(named)
        if len(names) != count:
            raise RequestError(
                f"adapter has {len(names)} entries for {count} prompts: give one, or one for each prompt.",
                param="adapter",
            )
        return [None if name is None else self.find(name, param="adapter") for name in names]

    def remove(self, name: str) -> Adapter:
        """Stop serving an adapter; running requests keep it.

        Raises:
            NotFoundError: there is no such adapter; lists the loaded ones.
        """
        adapter = self.find(name, param="lora_name")
        del self.adapters[name]
        return adapter

    def find(self, name: str, *, param: str = "model") -> Adapter:
        """Return the adapter of this name.

        Raises:
            NotFoundError: there is none; lists the loaded ones.
        """
        if name not in self.adapters:
            raise NotFoundError(
                f"There is no adapter {name!r} here. Loaded: {', '.join(map(repr, self.adapters)) or 'none'}.",
                param=param,
                code="model_not_found",
            )
        return self.adapters[name]


def read_adapters(named: Sequence[str], checkpoint: Checkpoint) -> tuple[list[Adapter], list[str]]:
    """Return the adapters of ``--lora name=path …`` for the model of ``checkpoint``, read and checked, with remarks.

    Raises:
        ConfigError: an entry has another form, or a name occurs twice.
        ModelLoadError: an adapter cannot be read.
    """
    adapters: dict[str, Adapter] = {}
    remarks: list[str] = []
    for text in named:
        name, _, path = text.partition("=")
        if not name.strip() or not path.strip():
            raise ConfigError(
                f"lora = {text!r} must be name=path, with the folder of an adapter or its id on the hub"
            )
        if name in adapters:
            raise ConfigError(f"lora: the name {name!r} is given twice; each adapter needs its own")
        model = None if checkpoint.kind == "random" else checkpoint.path
        adapters[name], more = _read(name, path, checkpoint.spec, model)
        remarks += more
    return list(adapters.values()), remarks


def locate_adapter(path: str) -> Path:
    """Return the folder of an adapter; "org/repo" is downloaded from the hub. Raises `ModelLoadError`."""
    folder = Path(path).expanduser()
    if folder.exists():
        return folder.resolve()
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelLoadError(
            f"there is no folder {path!r}: give the folder of a PEFT adapter, or its id on the hub."
        )
    return locate(path)


def _read(name: str, path: str, spec: ModelSpec, model: Path | None) -> tuple[Adapter, tuple[str, ...]]:
    """Return an adapter and remarks on it; the reader is loaded with the first. ``model``: on disk.

    Raises:
        ModelLoadError: it cannot be read, or does not fit the model.
    """
    from quire.lora.adapter import read_adapter
    from quire.lora.base_copies import check_copies

    file = read_adapter(name, locate_adapter(path), spec)
    copies = () if model is None else check_copies(file, model, spec)
    return file.adapter, (*file.remarks, *copies)
