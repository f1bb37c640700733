"""The parts of a decoder, each built from a spec and filled weight by weight. They own weights and call kernels."""
