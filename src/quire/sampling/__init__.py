"""Sampling: raw logits in, token ids and logprobs out. `Sampler` is the whole interface."""

from quire.sampling.sampler import Sampler, SeqSample

__all__ = ["Sampler", "SeqSample"]
