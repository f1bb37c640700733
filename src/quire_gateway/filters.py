"""Filters: hooks before and after the model. Each passes, changes or refuses what goes by, within a limit of time.

    class NoSecrets:
        def before(self, about: About, body: dict) -> dict | None: ...   # a request
        def after(self, about: About, text: str) -> str | None: ...      # text of an answer, in sentences

A method returns None to pass, a value to change, and raises `Refused` to refuse. Either may be missing; both may be
``async``, and plain ones run in a thread. ``module:Class`` names the hook, whose constructor gets ``options``.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from quire.errors import ConfigError
from quire.http.refusals import HttpError, Refusal
from quire.metrics.log import Log
from quire_gateway.filter_config import FILTERED, FilterArgs

log = Log("gateway")


@dataclass(frozen=True, slots=True)
class About:
    """What a hook is told beside the request or the text."""

    request_id: str
    path: str
    model: str
    tenant: str
    key: str  # its name
    choice: int = 0
    kind: str = "text"  # of an answer: text | reasoning | arguments (of a tool call, as JSON)
    preceding: str = ""  # the end of the text that was filtered before


class Refused(Exception):
    """Raised by a hook; the message is the client's."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A filter and its hook."""

    args: FilterArgs
    hook: Any

    def method(self, when: Literal["before", "after"]) -> Callable[..., Any] | None:
        method = getattr(self.hook, when, None) if self.args.when in ("both", when) else None
        return method if callable(method) else None


class Filters:
    """The chain of one gateway: each filter gets what the one before it made."""

    def __init__(self, chain: Sequence[Bound]) -> None:
        self._before = [(bound, method) for bound in chain if (method := bound.method("before")) is not None]
        self._after = [(bound, method) for bound in chain if (method := bound.method("after")) is not None]
        self.hold_chars = max((bound.args.hold_chars for bound, _ in self._after), default=0)
        self.counts: Counter[tuple[str, str, str]] = Counter()  # (filter, before | after, verdict)

    @property
    def reads_requests(self) -> bool:
        return bool(self._before)

    @property
    def reads_answers(self) -> bool:
        return bool(self._after)

    async def before(self, about: About, body: dict[str, Any]) -> dict[str, Any] | None:
        """Return the changed body of a request; None where nothing changes it. Raises `HttpError` if refused."""
        changed = None
        for bound, method in self._before:
            current = body if changed is None else changed
            answer = await self._ask(bound, "before", partial(method, about, current))
            if answer is not None and _is_fit(answer, current):
                changed = answer
            elif answer is not None:
                self._failed(bound, "before", "it changed model or stream, or returned no object")
        return changed

    async def after(self, about: About, text: str) -> str | None:
        """Return the changed text of an answer; None where nothing changes it. Raises `HttpError` if refused."""
        changed = None
        for bound, method in self._after:
            current = text if changed is None else changed
            answer = await self._ask(bound, "after", partial(method, about, current), text=current)
            if isinstance(answer, str):
                changed = answer
            elif answer is not None:
                self._failed(bound, "after", "it returned no text")
        return changed

    async def _ask(
        self, bound: Bound, when: Literal["before", "after"], call: Callable[[], Any], text: str | None = None
    ) -> Any:
        """Return a verdict; that of a hook which returns the ``text`` that it got is None, to pass."""
        name = bound.args.name
        try:
            async with asyncio.timeout(bound.args.timeout_s):
                answer = await _called(bound.method(when), call)
        except Refused as error:
            self.counts[name, when, "refused"] += 1
            message = f"Refused by the filter {name!r}: {error}"
            raise HttpError(Refusal(400, message, code=FILTERED)) from None
        except TimeoutError:
            self._failed(bound, when, f"no answer within {bound.args.timeout_s:g} s")
            return None
        except Exception as error:  # of the hook's own code
            self._failed(bound, when, f"{type(error).__name__}: {error}")
            return None
        answer = None if text is not None and answer == text else answer
        self.counts[name, when, "passed" if answer is None else "changed"] += 1
        return answer

    def _failed(self, bound: Bound, when: str, why: str) -> None:
        """A filter gave no verdict: go on, or refuse with `HttpError`."""
        self.counts[bound.args.name, when, "failed"] += 1
        log.warning(
            "filter_failed", filter=bound.args.name, when=when, why=why[:300], then=bound.args.on_failure
        )
        if bound.args.on_failure == "refuse":
            text = f"The filter {bound.args.name!r} gave no verdict, and nothing passes without one."
            raise HttpError(Refusal(503, text, code="filter_failed", headers=((b"retry-after", b"1"),)))


async def _called(method: Callable[..., Any] | None, call: Callable[[], Any]) -> Any:
    if inspect.iscoroutinefunction(method):
        return await call()
    answer = await asyncio.to_thread(call)
    return await answer if isinstance(answer, Awaitable) else answer


def _is_fit(answer: Any, before: Mapping[str, Any]) -> bool:
    """Whether a changed request is still for the model that its key may use, and answered in the same way."""
    if not isinstance(answer, dict):
        return False
    return all(answer.get(name) == before.get(name) for name in ("model", "stream"))


def load_hook(path: str, options: Mapping[str, Any], where: str) -> Any:
    """Make the object of ``module:Class``.

    Raises:
        ConfigError: it cannot be imported or made.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{where} = {path!r} must be module:Class")
    try:
        return getattr(importlib.import_module(module), name)(**options)
    except Exception as error:  # of the hook's own code
        raise ConfigError(f"{where} = {path!r} cannot be made: {type(error).__name__}: {error}") from error
