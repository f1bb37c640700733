"""`PictureView`: a `quire_lab.learn.picture.Picture` in the browser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nicegui.element import Element


class PictureView(Element, component="picture.js"):
    """Drawn as SVG and tables."""

    def push(self, picture: dict[str, Any], compared: Sequence[dict[str, Any]] = ()) -> None:
        """Draw ``picture``, with the axes that it has in common with the pictures that it is compared with."""
        self.run_method("push", picture, list(compared))

    def fail(self, text: str) -> None:
        """Show a problem in place of a picture."""
        self.run_method("fail", text)

    def reveal(self) -> None:
        """Scroll to the picture, where it is out of sight."""
        self.run_method("reveal")
