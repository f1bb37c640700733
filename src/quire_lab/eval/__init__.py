"""How faithful a model is: perplexity, distance from the original's distributions, and choice tasks (docs/eval.md)."""
