"""`CoreCalls`: the messages of the inbox that no plain request sends: calls that are answered, and transfers of blocks.

Loaded with the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.cache.events import EventsLost, pack
from quire.engine.core import EngineCore
from quire.engine.messages import (
    ChangePolicy,
    ControlPolicy,
    LoadKv,
    Message,
    Reply,
    ResetPrefixCache,
    SaveRecording,
    StoreKv,
    TakeCacheEvents,
    TakeLive,
    TransfersDone,
)
from quire.errors import ConfigError
from quire.executor.profile_control import TakeProfile
from quire.scheduler.live import LiveLog
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.settings import settings


class CoreCalls:
    """The calls of one core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def carry_out(self, message: Message | ControlPolicy) -> None:
        """Do what ``message`` says, between two steps."""
        match message:
            case LoadKv(request_id, remote, num_blocks, handle):
                self._core.scheduler.transfers.load(request_id, remote, num_blocks, handle)
            case StoreKv(block_hash, remote, num_blocks, handle):
                self._core.scheduler.transfers.store(block_hash, remote, num_blocks, handle)
            case TransfersDone(ended):
                self._core.scheduler.transfers.end(ended)
            case _:
                self._core.replies.append(self._answer(message))

    def _answer(self, message: Message | ControlPolicy) -> Reply:
        core = self._core
        match message:
            case ChangePolicy():
                return self._change_policy(message)
            case TakeCacheEvents(call_id, snapshot):
                return Reply(call_id, _cache_events(core.scheduler, snapshot=snapshot))
            case TakeLive(call_id):
                core.live = core.live or LiveLog(core.clock.now())
                return Reply(call_id, core.live.read(core.scheduler, core.clock))
            case TakeProfile(call_id):
                return Reply(call_id, **message.carry_out(core.profiler))
            case SaveRecording(call_id):
                return _saved(call_id, core.save)
            case ResetPrefixCache(call_id):
                return Reply(call_id, {"num_freed_blocks": core.scheduler.cache.prefix.clear()})
            case _:
                raise AssertionError(f"{type(message).__name__} is not a call")

    def _change_policy(self, call: ChangePolicy) -> Reply:
        scheduler, controller = self._core.scheduler, self._core.controller
        before = settings(scheduler.config)
        try:
            if call.release and controller is None:
                raise ConfigError("Nothing can be released: the server runs without --slo.", param="release")
            scheduler.change_policy(call.change)
        except ConfigError as error:
            return Reply(call.call_id, before, error=str(error), param=error.param)
        after = settings(scheduler.config)
        if controller is None:
            return Reply(call.call_id, after, before)
        controller.pin(call.change, call.release)
        return Reply(call.call_id, after, before, pinned=tuple(sorted(controller.pinned)))


def _saved(call_id: str, save: Callable[[str, str], dict[str, Any]] | None) -> Reply:
    if save is None:
        return Reply(call_id, {}, error="The flight recorder is off: start the server with --record-steps.")
    try:
        return Reply(call_id, save("asked", ""))
    except OSError as error:
        return Reply(call_id, {}, error=f"The recording cannot be written: {error}")


def _cache_events(scheduler: Scheduler, *, snapshot: bool) -> dict[str, Any]:
    buffer = scheduler.cache_events
    events = buffer.drain() if buffer is not None else []
    if snapshot or (events and isinstance(events[0], EventsLost)):
        return {"events": pack(scheduler.cache.prefix.snapshot()), "snapshot": True}
    return {"events": pack(event for event in events if not isinstance(event, EventsLost)), "snapshot": False}
