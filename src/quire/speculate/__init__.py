"""Proposers of drafts: tokens that a model is likely to sample next, for the worker to verify in one step."""
