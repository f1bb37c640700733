"""Puts the training scripts of tools/quill on the import path: they are scripts, not part of the package."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "quill"))
