"""Benchmarks of a server (`serve`), of the engine in this process (`offline`), and `quire profile`."""
