"""Sampling: raw logits in, token ids and log-probabilities out."""
