"""`Dialect`: how one API writes requests and answers. `quire.api.dialects` is the one list of them.

    read     body ──> `Job`: what is asked
    render   events of the engine ──> `Answer` of the job ──> bytes

No dialect knows another, except `native`, whose forms are text completions of `openai` in other words. What two share
is next to them in `quire.api`, under the name of what it is. Modules of a dialect are imported with the first request
for it, except those that are `loaded_at_start`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from quire.api.late import Late

if TYPE_CHECKING:
    from quire.api.job import Job
    from quire.api.state import ApiState
    from quire.http.call import Call


class Read(Protocol):
    """Turns the decoded body of one path into what is asked; the `Answer` of the job renders what comes of it."""

    async def __call__(self, state: ApiState, call: Call, body: Any, ignored: list[str] | None, /) -> Job:
        """Check the body. ``ignored`` collects fields without effect, and judges unknown names.

        Raises:
            RequestError: names the field, the value and what is allowed.
        """


class Compute(Protocol):
    """Turns the decoded body of one path into the JSON value of its answer; nothing is generated."""

    async def __call__(self, state: ApiState, call: Call, body: Any, ignored: list[str] | None, /) -> Any:
        """Raises what `Read` does."""


@dataclass(frozen=True, slots=True)
class Handled:
    """A path whose requests have no body that is read here. ``handler``: as "module:Class.method"."""

    path: str
    handler: str
    methods: Sequence[str] = ("GET",)
    is_described: bool = True


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API: its paths, and what reads their bodies."""

    name: str
    read: Mapping[str, Late] = field(default_factory=dict)
    compute: Mapping[str, Late] = field(default_factory=dict)
    handled: Sequence[Handled] = ()
    # Paths of `read` whose first request is not to wait for an import.
    loaded_at_start: Sequence[str] = ()
    # "module:Class" of a `CallStage` that a request of `read` passes before any other.
    stage: str = ""
