from __future__ import annotations
from nicegui import ui
def show_plan(watched, visitor): ui.label("plan")
def show_simulate(watched, visitor): ui.label("sim")
