"""``python -m quire.cockpit URL …``: the page's process."""

from __future__ import annotations

import argparse

from quire.cockpit.app import Listen, serve_page

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="quire.cockpit")
    parser.add_argument("url")
    parser.add_argument("--admin-url")
    parser.add_argument("--uds")
    parser.add_argument("--life", type=int)
    given = parser.parse_args()
    raise SystemExit(serve_page(given.url, given.admin_url, Listen(uds=given.uds, life_fd=given.life)))
