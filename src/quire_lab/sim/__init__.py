"""The simulator: the engine's own scheduler, cache and routing on a virtual clock, with step times from a model."""
