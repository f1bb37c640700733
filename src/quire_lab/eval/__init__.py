"""How faithful a model is: perplexity, distance from the original, choice tasks (docs/benchmarking.md)."""
