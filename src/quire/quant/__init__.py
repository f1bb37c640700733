"""Quantized weights: what checkpoints store → the exchange form (`QuantizedWeight`), and rounding on load."""
