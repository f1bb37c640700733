"""``SIGUSR2`` to any process of a server asks for a recording; each passes it on towards the engine.

Only the standard library is imported: the process in front of a server starts before anything else is loaded.
"""

from __future__ import annotations

import os
import signal


def pass_recording_signal_on() -> None:
    """Have ``SIGUSR2``, which asks for a recording, go on to the parent: it is the engine, or knows it."""
    parent = os.getppid()

    def pass_on(*_: object) -> None:
        if os.getppid() == parent:  # else it has ended
            os.kill(parent, signal.SIGUSR2)

    signal.signal(signal.SIGUSR2, pass_on)
