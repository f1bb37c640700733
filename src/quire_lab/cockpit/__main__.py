"""``python -m quire_lab.cockpit URL …``: the page's process."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.recording_signal import pass_recording_signal_on
from quire_lab.cockpit.app import Listen, serve_page

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="quire_lab.cockpit")
    parser.add_argument("url")
    parser.add_argument("--admin-url")
    parser.add_argument("--uds")
    parser.add_argument("--life", type=int)
    parser.add_argument("--commands", type=Path)
    given = parser.parse_args()
    if given.life is not None:  # a server's own page
        pass_recording_signal_on()
    listen = Listen(uds=given.uds, life_fd=given.life)
    raise SystemExit(serve_page(given.url, given.admin_url, listen, given.commands.read_bytes()))
