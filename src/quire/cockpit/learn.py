from __future__ import annotations
from nicegui import ui
def show_lessons(watched, visitor): ui.label("learn")
def show_learn(watched, visitor, name): ui.label(name)
