"""What the GPU backend reaches, in parts of minutes, each beside the ceilings of the same run. See docs/gpu.md."""
