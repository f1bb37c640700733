"""Sixteen small simulations for learning how a language model is served, each computed by the engine's own objects.

picture      what a simulation shows, as data        simulation   controls and how they are read
registry     all of them, by name                    draw         a picture in the terminal
engine       requests through scheduler and cache, with every step that was planned
"""
