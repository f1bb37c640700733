"""`quire quantize`: a checkpoint in 16 bits becomes a smaller one that others read too (docs/quantization.md)."""
