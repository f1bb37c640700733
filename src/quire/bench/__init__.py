"""Benchmarks: `kernel` times single ops beside what the machine gives."""
