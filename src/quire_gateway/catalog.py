"""`Catalog`: from the name that a client sends to names that backends serve, in the order to try them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from random import Random

from quire.errors import NotFoundError, RequestError, clip, nearest
from quire.http.refusals import LATEST, PLACEHOLDERS
from quire_gateway.config import Cause, ModelConfig


@dataclass(frozen=True, slots=True)
class Target:
    """One name that backends serve."""

    model: str
    is_fallback: bool = False
    when: frozenset[Cause] = frozenset()  # what a fallback is taken for


class Catalog:
    """The models that clients may name: those of the configuration and those that backends serve."""

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        default: str | None,
        served: Callable[[], list[str]],
        random: Random,
        auto: str | None = None,
        base_of: Callable[[str], str] = lambda name: name,
        stand_ins: tuple[str, ...] = (),
    ) -> None:
        """``base_of``: the name of the model that a served name is a further name or an adapter of.

        ``stand_ins``: names, with * for anything, that stand for the default model where no model is called so, beside
        those that clients send for whatever is served.
        """
        self._stand_ins = (*PLACEHOLDERS, *stand_ins)
        self._base_of = base_of
        self._auto = [auto] if auto is not None else []  # a name that `AutoModel` replaces
        self._models = models
        self._default = default
        self._served = served
        self._random = random

    def names(self) -> list[str]:
        """Return the names that ``/v1/models`` lists."""
        return list(dict.fromkeys((*self._auto, *self._models, *self._served())))

    def tagged(self, name: str | None) -> str | None:
        """Return the name behind one of Ollama's, whose tag may be left out or added."""
        known = self.names()
        if name is None or name in known:
            return name
        other = name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST
        return other if other in known else name

    def served_as(self, name: str) -> str:
        """Return the name by which backends serve most of a listed model."""
        model = self._models.get(name)
        return name if model is None else max(model.split, key=lambda served: model.split[served])

    def targets(self, name: str | None) -> list[Target]:
        """Return what to try for a request that names the model ``name``, in order.

        Raises:
            RequestError: no name is given and no default can be told.
            NotFoundError: the name is not known; lists those that are.
        """
        if not name or self._is_stand_in(name):
            name = self._default or self._only()
        model = self._models.get(name)
        if model is None:
            if name not in self._served() and name not in self._auto:
                known = self.names()
                listed = ", ".join(map(repr, known)) or "none (no backend is up)"
                text = f"The model {clip(name)} is not served here{nearest(name, known)}. Served: {listed}."
                raise NotFoundError(text, param="model", code="model_not_found")
            return [Target(name)]
        targets = [Target(self._pick(model.split))]
        for fallback in model.fallbacks:
            other = self._models.get(fallback)
            served = self._pick(other.split) if other is not None else fallback
            targets.append(Target(served, is_fallback=True, when=model.when))
        return targets

    def _is_stand_in(self, name: str) -> bool:
        is_like = any(fnmatchcase(name, pattern) for pattern in self._stand_ins)
        return is_like and name not in self.names()

    def _pick(self, split: Mapping[str, float]) -> str:
        if len(split) == 1:
            return next(iter(split))
        return self._random.choices(list(split), list(split.values()))[0]

    def _only(self) -> str:
        names = self.names()
        primary = {model.name for model in self._models.values()} or set(map(self._base_of, self._served()))
        if len(primary) == 1:
            return primary.pop()
        listed = ", ".join(map(repr, names)) or "none (no backend is up)"
        raise RequestError(f"model is required: it must be one of {listed}.", param="model")
